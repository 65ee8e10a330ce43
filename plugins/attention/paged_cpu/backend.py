"""The backend over this folder's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from hotswap.core.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    BatchGeometry,
    Capabilities,
    KVLayout,
    LayerCache,
)
from hotswap.core.layers.jit.paged_cache import PagedCache
from hotswap.core.layers.jit.rope_write_kv import write_to

from .kernel import AttentionPlan, PagedAttention, plan_attention


class PagedCpuAttention(AttentionBackend):
    """Keys lie token-last, so that the scores of a block are vectors over its tokens."""

    layout = KVLayout(
        name="key_token_last",
        key_shape=("block", "head", "dim", "token"),
        value_shape=("block", "head", "token", "dim"),
        block_sizes=(),
    )
    capabilities = Capabilities(dtypes=("float32", "bfloat16"), window=True, soft_cap=True, non_causal=True)

    def __init__(self) -> None:
        self._geometry: BatchGeometry | None = None
        self._plans: dict[int, AttentionPlan] = {}  # by query heads per KV head; of the current step
        self._layers: dict[int, PagedAttention] = {}  # by layer index; made at the layer's first call
        self._caches: dict[int, PagedCache] = {}  # by address of the keys

    def prepare(self, geometry: BatchGeometry) -> None:
        self._geometry = geometry
        self._plans.clear()

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None:
        write_to(self._cache(cache), key, value, self._step().slot_mapping)

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        step = self._step()
        kernel = self._layers.get(layer.index)
        if kernel is None or kernel.cache.key_cache is not cache[0]:
            kernel = self._layers[layer.index] = _kernel(query, self._cache(cache), layer, causal=step.causal)
        plan = self._plans.get(kernel.group)
        if plan is None:
            plan = plan_attention(step.query_start_loc, step.seq_lens, step.block_table, kernel.group)
            self._plans[kernel.group] = plan
        out = torch.empty((query.shape[0], layer.num_heads, layer.head_dim_v), dtype=query.dtype)
        return kernel(query, plan, out)

    def _cache(self, cache: LayerCache) -> PagedCache:
        key = cache[0].data_ptr()
        found = self._caches.get(key)
        if found is None or found.key_cache is not cache[0]:
            found = self._caches[key] = PagedCache.of(*cache)
        return found

    def _step(self) -> BatchGeometry:
        if self._geometry is None:
            raise RuntimeError("prepare() must come before the first layer of a step")
        return self._geometry


def _kernel(query: Tensor, cache: PagedCache, layer: AttentionLayer, *, causal: bool) -> PagedAttention:
    return PagedAttention(
        layer.num_heads,
        cache,
        layer.scale,
        query.dtype,
        causal=causal,
        window=layer.window or 0,
        soft_cap=layer.soft_cap or 0.0,
    )
