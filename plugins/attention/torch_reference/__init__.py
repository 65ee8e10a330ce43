"""Attention `torch_reference`: slow and obvious, in float32, on any device. The oracle, and what runs where nothing
faster can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotswap.core.contracts.attention import AttentionBackend, AttentionContext
from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.provider import Provider


def _build(context: AttentionContext) -> AttentionBackend:
    from .backend import TorchReferenceAttention

    return TorchReferenceAttention()


def _unavailable(context: AttentionContext) -> Sequence[str]:
    spec = context.spec
    if spec is not None and spec.kind not in ("full", "window"):
        return [f"it serves full and window caches, not {spec.kind}"]
    return []


@hookimpl
def hotswap_attention() -> Iterator[Provider[AttentionBackend]]:
    yield Provider(
        name="torch_reference",
        build=_build,
        unavailable=_unavailable,
        priority=-100,
        summary="Plain torch in float32, request by request: the oracle. Any device, any shape, slow.",
    )
