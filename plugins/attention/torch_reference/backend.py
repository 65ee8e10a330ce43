"""Paged attention as its definition says: gather each request's keys and values, then attend densely."""

from __future__ import annotations

from torch import Tensor

from hotswap.core.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    BatchGeometry,
    Capabilities,
    KVLayout,
    LayerCache,
)
from hotswap.core.layers.reference import attention

_DIMENSIONS = ("block", "token", "head", "dim")


class TorchReferenceAttention(AttentionBackend):
    """Loops over requests; all arithmetic in float32."""

    layout = KVLayout("token_major", _DIMENSIONS, _DIMENSIONS, tuple(range(1, 257)))
    capabilities = Capabilities(
        dtypes=("float32", "bfloat16", "float16"),
        window=True,
        soft_cap=True,
        sinks=True,
        alibi=True,
        non_causal=True,
        fp8_cache=True,
        graph_capture="none",
    )

    _geometry: BatchGeometry
    _starts: list[int]  # first token of each request, and the end
    _seq_lens: list[int]

    def prepare(self, geometry: BatchGeometry) -> None:
        self._geometry = geometry
        self._starts = geometry.query_start_loc[: geometry.num_requests + 1].tolist()
        self._seq_lens = geometry.seq_lens[: geometry.num_requests].tolist()

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None:
        slots = self._geometry.slot_mapping
        written = slots >= 0  # -1: padding, or a token that is cached already
        for new, stored in zip((key, value), cache, strict=True):
            by_slot = stored.view(-1, *stored.shape[2:])
            by_slot[slots[written]] = new[: slots.shape[0]][written].to(stored.dtype)

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        # Rows of padding tokens stay zero.
        output = query.new_zeros(query.shape[0], layer.num_heads, layer.head_dim_v)
        for request, seq_len in enumerate(self._seq_lens):
            start, end = self._starts[request], self._starts[request + 1]
            if end > start:
                keys, values = (self._context(stored, request, seq_len) for stored in cache)
                output[start:end] = attention(query[start:end], keys, values, layer, self._geometry.causal)
        return output

    def _context(self, stored: Tensor, request: int, seq_len: int) -> Tensor:
        """[seq_len, KVH, D] out of a request's blocks."""
        num_blocks = -(-seq_len // self._geometry.block_size)
        blocks = self._geometry.block_table[request, :num_blocks].long()
        return stored[blocks].flatten(0, 1)[:seq_len]
