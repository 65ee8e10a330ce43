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

from hotswap.plugins.kernels.llvm_cpu.paged_attention import AttentionPlan, paged_attention, plan_attention
from hotswap.plugins.kernels.llvm_cpu.rope import write_kv


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

    def prepare(self, geometry: BatchGeometry) -> None:
        self._geometry = geometry
        self._plans.clear()

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None:
        write_kv(key, value, cache[0], cache[1], self._step().slot_mapping)

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        step = self._step()
        group = layer.num_heads // layer.num_kv_heads
        plan = self._plans.get(group)
        if plan is None:
            plan = self._plans[group] = plan_attention(step.query_start_loc, step.seq_lens, group)
        out = torch.empty((query.shape[0], layer.num_heads, layer.head_dim_v), dtype=query.dtype)
        return paged_attention(
            query,
            cache[0],
            cache[1],
            step.query_start_loc,
            step.seq_lens,
            step.block_table,
            layer.scale,
            causal=step.causal,
            window=layer.window or 0,
            soft_cap=layer.soft_cap or 0.0,
            out=out,
            plan=plan,
        )

    def _step(self) -> BatchGeometry:
        if self._geometry is None:
            raise RuntimeError("prepare() must come before the first layer of a step")
        return self._geometry
