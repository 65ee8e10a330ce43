"""Attention `flashinfer`: FlashInfer's kernels over the paged cache, where they are installed and somebody names them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from hotswap.core.contracts.attention import AttentionBackend, AttentionContext
from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.provider import Provider

from ..half_precision import common_reasons, dotted

_OLDEST = (8, 0)
_HEAD_SIZES = (64, 128, 256)


def _unavailable(context: AttentionContext) -> list[str]:
    reasons = list(common_reasons(context))
    if importlib.util.find_spec("flashinfer") is None:
        reasons.append("FlashInfer is not installed: pip install 'hotswap[flashinfer]'")
    device, spec = context.device, context.spec
    if device.kind == "cuda" and device.capability < _OLDEST:
        reasons.append(
            f"it needs compute capability {dotted(_OLDEST)} or newer, {device.name} has {dotted(device.capability)}"
        )
    if spec is not None and spec.head_dim_k not in _HEAD_SIZES:
        reasons.append(f"its head sizes are {', '.join(map(str, _HEAD_SIZES))}, not {spec.head_dim_k}")
    return reasons


def _build(context: AttentionContext) -> AttentionBackend:
    from .backend import FlashInferAttention

    context.logger.warning(
        "attention: FlashInfer plans every step on the host, which waits for the device, and steps are not captured in graphs"
    )
    return FlashInferAttention()


@hookimpl
def hotswap_attention() -> Iterator[Provider[AttentionBackend]]:
    yield Provider(
        name="flashinfer",
        build=_build,
        unavailable=_unavailable,
        automatic=False,
        summary="FlashInfer over the paged cache; NVIDIA cards from Ampere on; plans each step on the host.",
    )
