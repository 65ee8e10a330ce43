"""What other people's kernels for NVIDIA cards have in common: reasons against a cache that none of them serves."""

from __future__ import annotations

from collections.abc import Iterator

from hotswap.core.contracts.attention import AttentionContext, AttentionLayer, CacheSpec

DTYPES = ("bfloat16", "float16")


def common_reasons(context: AttentionContext) -> Iterator[str]:
    """For kernels of 16-bit queries over a cache in the same dtype, whose windows and soft caps are their only extras."""
    if context.device.kind != "cuda":
        yield f"it runs on NVIDIA cards, the device is {context.device.kind}"
    if context.config.deterministic:
        yield "how it splits contexts depends on the batch, which --deterministic rules out"
    spec = context.spec
    if spec is not None:
        yield from _against_cache(spec)
        if context.model is not None and spec.dtype in DTYPES and context.model.dtype != spec.dtype:
            yield f"queries and cache must be of one dtype, not {context.model.dtype} and {spec.dtype}"
    for layer in context.layers:
        missing = list(_not_served(layer))
        if missing:
            yield f"it has no {' and no '.join(missing)}, which layer {layer.index} uses"
            break


def dotted(capability: tuple[int, int]) -> str:
    """A compute capability as people write it."""
    return ".".join(map(str, capability))


def _against_cache(spec: CacheSpec) -> Iterator[str]:
    if spec.kind not in ("full", "window"):
        yield f"it serves full and window caches, not {spec.kind}"
    if spec.dtype not in DTYPES:
        yield f"its cache dtypes are {' and '.join(DTYPES)}, not {spec.dtype}"
    if spec.head_dim_k != spec.head_dim_v:
        yield f"keys ({spec.head_dim_k}) and values ({spec.head_dim_v}) must have one head size"


def _not_served(layer: AttentionLayer) -> Iterator[str]:
    if layer.sinks is not None:
        yield "attention sinks"
    if layer.alibi_slopes is not None:
        yield "ALiBi"
