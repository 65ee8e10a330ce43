"""Attention `triton_paged`: Triton kernels over the paged cache for prefill, decode and everything between, on GPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from hotswap.core.contracts.attention import AttentionBackend, AttentionContext, CacheSpec
from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.provider import DeviceInfo, Provider

_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
_MAX_HEAD_SIZE = 256


def _unavailable(context: AttentionContext) -> list[str]:
    device = context.device
    reasons = []
    if device.kind not in ("cuda", "rocm"):
        reasons.append(f"it makes code for GPUs, the device is {device.kind}")
    elif device.kind == "cuda" and device.capability < (7, 0):
        reasons.append(f"it needs compute capability 7.0, {device.name} has {_version(device)}")
    if importlib.util.find_spec("triton") is None:
        reasons.append("the package triton is not installed: pip install 'hotswap[triton]'")
    if context.spec is not None:
        reasons += _against_cache(context.spec, device)
    return reasons


def _against_cache(spec: CacheSpec, device: DeviceInfo) -> Iterator[str]:
    if spec.kind not in ("full", "window"):
        yield f"it serves full and window caches, not {spec.kind}"
    if spec.dtype not in _DTYPES:
        yield f"its cache dtypes are {', '.join(_DTYPES)}, not {spec.dtype}"
    for size in sorted({spec.head_dim_k, spec.head_dim_v}):
        if size > _MAX_HEAD_SIZE or size % 8:
            yield f"its head sizes are the multiples of 8 up to {_MAX_HEAD_SIZE}, not {size}"
    if device.kind == "cuda":
        if spec.dtype == "bfloat16" and device.capability < (8, 0):
            yield f"bfloat16 needs compute capability 8.0, {device.name} has {_version(device)}: use --dtype float16"
        if spec.dtype == "float8_e4m3fn" and device.capability < (8, 9):
            yield f"a float8_e4m3fn cache needs compute capability 8.9, {device.name} has {_version(device)}"
    elif spec.dtype.startswith("float8"):
        yield f"a {spec.dtype} cache is served on NVIDIA cards only"


def _version(device: DeviceInfo) -> str:
    return ".".join(map(str, device.capability))


def _build(context: AttentionContext) -> AttentionBackend:
    from .backend import TritonPagedAttention

    return TritonPagedAttention(context.device, deterministic=context.config.deterministic)


@hookimpl
def hotswap_attention() -> Iterator[Provider[AttentionBackend]]:
    yield Provider(
        name="triton_paged",
        build=_build,
        unavailable=_unavailable,
        priority=10,
        summary="Triton kernels for prefill and decode over the paged cache, on NVIDIA and AMD cards.",
    )
