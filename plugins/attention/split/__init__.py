"""Attention `split`: one backend for steps that decode, another for all others, over one cache.

--plugin attention=split,prefill=flash_attn,decode=triton_paged
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field, field_validator

from hotswap.core.contracts import PluginError
from hotswap.core.contracts.attention import AttentionBackend, AttentionContext
from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.provider import Provider


class SplitOptions(BaseModel):
    """Options of `--plugin attention=split`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefill: str = Field(description="The attention backend of steps with prompts, and of mixed ones.")
    decode: str = Field(description="The attention backend of steps in which each request has one new token.")

    @field_validator("prefill", "decode")
    @classmethod
    def _another(cls, name: str) -> str:
        if name == "split":
            raise ValueError("name another backend than split")
        return name


def _unavailable(context: AttentionContext) -> list[str]:
    if context.config.deterministic:
        return ["which backend computes a token depends on the batch, which --deterministic rules out"]
    return []


def _build(context: AttentionContext) -> AttentionBackend:
    """`resolve("attention", NAME)` builds for the same cache group, under the checks of a named choice."""
    from .backend import SplitAttention

    options = context.options
    if not isinstance(options, SplitOptions) or context.resolve is None:
        raise PluginError(
            "attention 'split' needs its options, prefill and decode, and `resolve` to build what they name"
        )
    prefill = context.resolve("attention", options.prefill)
    decode = prefill if options.decode == options.prefill else context.resolve("attention", options.decode)
    return SplitAttention((options.prefill, prefill), (options.decode, decode), context.block_size)


@hookimpl
def hotswap_attention() -> Iterator[Provider[AttentionBackend]]:
    yield Provider(
        name="split",
        build=_build,
        options=SplitOptions,
        unavailable=_unavailable,
        automatic=False,
        summary="One backend for prefill, another for decode, where they lay out the cache alike.",
    )
