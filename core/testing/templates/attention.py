"""Attention `my_attention`: gathers each request's blocks, then attends densely. Slow and plain: a place to start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hotswap.core.contracts import (
    AttentionBackend,
    AttentionContext,
    AttentionLayer,
    BatchGeometry,
    Capabilities,
    KVLayout,
    LayerCache,
    Provider,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import Tensor

_DIMENSIONS = ("block", "token", "head", "dim")  # of the cache, in memory order


class MyAttention(AttentionBackend):
    layout = KVLayout("my_attention", _DIMENSIONS, _DIMENSIONS, block_sizes=())  # any
    capabilities = Capabilities(
        dtypes=("float32", "bfloat16"), window=True, soft_cap=True, sinks=True, alibi=True, non_causal=True
    )

    _step: BatchGeometry

    def prepare(self, geometry: BatchGeometry) -> None:
        self._step = geometry

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None:
        slots = self._step.slot_mapping
        written = slots >= 0  # -1: a padding token
        for new, stored in zip((key, value), cache, strict=True):
            stored.view(-1, *stored.shape[2:])[slots[written]] = new[written].to(stored.dtype)

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        from hotswap.core.layers.reference import attention  # here: it imports torch

        step = self._step
        output = query.new_zeros(query.shape[0], layer.num_heads, layer.head_dim_v)
        for request in range(step.num_requests):
            start, end = step.query_start_loc[request : request + 2].tolist()
            length = int(step.seq_lens[request])
            blocks = step.block_table[request, : -(-length // step.block_size)].long()
            keys, values = (stored[blocks].flatten(0, 1)[:length] for stored in cache)
            if end > start:
                output[start:end] = attention(query[start:end], keys, values, layer, step.causal)
        return output


def unavailable(context: AttentionContext) -> Sequence[str]:
    spec = context.spec  # None: no model is known yet
    if spec is not None and spec.kind not in ("full", "window"):
        return [f"it serves full and window caches, not {spec.kind}"]
    return []


@hookimpl
def hotswap_attention() -> Iterator[Provider[AttentionBackend]]:
    yield Provider(
        name="my_attention",
        build=lambda context: MyAttention(),
        unavailable=unavailable,
        summary="Dense attention over gathered blocks, request by request.",
    )
