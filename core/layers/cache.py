"""What attention layers keep in the KV cache."""

from __future__ import annotations

from ..contracts.attention import AttentionLayer, CacheSpec
from ..contracts.model import ModelContext


def full_cache_spec(layer: AttentionLayer, context: ModelContext) -> CacheSpec:
    """Every token of the context, in the model's dtype (`--kv-cache-dtype` is applied by whoever allocates the
    cache)."""
    dtype = str(context.torch_dtype).removeprefix("torch.")
    return CacheSpec("full", layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v, dtype)
