"""Attention `flash_attn` (FlashAttention 2 and 3) and `flash_attn_4`: used where somebody has installed them.

Both only when named, until one has been measured as faster than `triton_paged`. Versions 2 and 3 have not been run on a card
with this version; on an H200 version 4 is slower at decoding, and a call of it keeps the host for 0.2 ms. Mixed steps of
versions 2 and 3 do not run in graphs, as those of `triton_paged` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hotswap.core.contracts.attention import AttentionBackend, AttentionContext
from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.provider import Provider

from ..half_precision import dotted
from .versions import VERSION_2, VERSION_3, VERSION_4, Version, choose, reasons_against

_SECOND_AND_THIRD = (VERSION_3, VERSION_2)
_FOURTH = (VERSION_4,)


def _unavailable(candidates: Sequence[Version]) -> Callable[[AttentionContext], Sequence[str]]:
    return lambda context: reasons_against(candidates, context)


def _build(candidates: Sequence[Version]) -> Callable[[AttentionContext], AttentionBackend]:
    def build(context: AttentionContext) -> AttentionBackend:
        from .backend import FlashAttention

        chosen = choose(candidates, context)
        if chosen is None:  # only when asked to build what `unavailable` refuses
            raise ValueError("; ".join(reasons_against(candidates, context)))
        device = context.device
        context.logger.info(
            "attention: %s (%s) on %s, compute capability %s",
            chosen.name,
            chosen.module,
            device.name,
            dotted(device.capability),
        )
        return FlashAttention(chosen)

    return build


@hookimpl
def hotswap_attention() -> Iterator[Provider[AttentionBackend]]:
    yield Provider(
        name="flash_attn",
        build=_build(_SECOND_AND_THIRD),
        unavailable=_unavailable(_SECOND_AND_THIRD),
        automatic=False,
        summary="FlashAttention 3, else 2, over the paged cache; NVIDIA cards from Ampere on.",
    )
    yield Provider(
        name="flash_attn_4",
        build=_build(_FOURTH),
        unavailable=_unavailable(_FOURTH),
        automatic=False,
        summary="FlashAttention 4 (flash_attn.cute); from Hopper on, where triton_paged decodes faster.",
    )
