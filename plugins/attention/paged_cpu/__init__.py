"""Attention `paged_cpu`: blocks read in place by vector code made for the host's processor."""

from __future__ import annotations

from collections.abc import Iterator

from hotswap.core.contracts.attention import AttentionBackend, AttentionContext
from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.provider import Provider

_DTYPES = ("float32", "bfloat16")


def _unavailable(context: AttentionContext) -> list[str]:
    reasons = []
    if context.device.kind not in ("cpu", "host"):
        reasons.append(f"it runs on processors, the device is {context.device.kind}")
    spec = context.spec
    if spec is not None:
        if spec.dtype not in _DTYPES:
            reasons.append(f"its cache dtypes are {' and '.join(_DTYPES)}, not {spec.dtype}")
        if spec.kind not in ("full", "window"):
            reasons.append(f"it serves full and window caches, not {spec.kind}")
        if spec.head_dim_k != spec.head_dim_v:
            reasons.append(f"keys ({spec.head_dim_k}) and values ({spec.head_dim_v}) must have one head size")
    if any(layer.sinks is not None for layer in context.layers):
        reasons.append("it has no attention sinks")
    if any(layer.alibi_slopes is not None for layer in context.layers):
        reasons.append("it has no ALiBi")
    return reasons


def _build(context: AttentionContext) -> AttentionBackend:
    from .backend import PagedCpuAttention

    return PagedCpuAttention()


@hookimpl
def hotswap_attention() -> Iterator[Provider[AttentionBackend]]:
    yield Provider(
        name="paged_cpu",
        build=_build,
        unavailable=_unavailable,
        priority=10,
        summary="Prefill and decode on the CPU, reading 16-token blocks where they lie.",
    )
