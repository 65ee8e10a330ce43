"""The backend over FlashInfer's wrapper for batches of any query lengths.

Its wrapper for decoding is not used: with tensor cores it plans the same kernel, without them it serves few group sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor
from torch.nn import functional as F

from hotswap.core.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    BatchGeometry,
    Capabilities,
    LayerCache,
)

from ..half_precision import DTYPES
from ..token_major import SlotWriter, blocks_behind, token_major

_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends; for the parts of contexts that it splits


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a step, on the host: int32 [R + 1] the first row of each request, int32 [R] its context."""

    starts: Tensor
    seq_lens: Tensor


@dataclass(frozen=True, slots=True)
class Pages:
    """What the planner is told of the contexts. page_starts: int32 [R + 1], host. indices: int32 [pages], device.
    last_page_tokens: int32 [R], host."""

    page_starts: Tensor
    indices: Tensor
    last_page_tokens: Tensor


class FlashInferAttention(AttentionBackend):
    """A wrapper is planned once a step for each kind of layer (heads, scale, window, soft cap). They share one workspace, since
    their calls follow each other in one stream."""

    layout = token_major(())
    capabilities = Capabilities(dtypes=DTYPES, window=True, soft_cap=True, non_causal=True, graph_capture="none")

    def __init__(self) -> None:
        self._geometry: BatchGeometry | None = None
        self._lengths: Lengths | None = None
        self._writer = SlotWriter()
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[Any, ...], BatchPrefillWithPagedKVCacheWrapper] = {}
        self._planned: set[tuple[Any, ...]] = set()

    def prepare(self, geometry: BatchGeometry) -> None:
        """Waits for the device: the planner needs lengths on the host, and a geometry has them on the device."""
        self._geometry = geometry
        self._writer.clear()
        self._planned.clear()
        self._lengths = _lengths(geometry)

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None:
        self._writer.write(key, value, cache, self._prepared()[0].slot_mapping)

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        tokens = int(self._prepared()[1].starts[-1])
        attended: Tensor = self._planned_for(query, cache, layer).run(query[:tokens].contiguous(), cache)
        if tokens == len(query):
            return attended
        out = query.new_zeros(len(query), layer.num_heads, layer.head_dim_v)
        out[:tokens] = attended
        return out

    def _planned_for(
        self, query: Tensor, cache: LayerCache, layer: AttentionLayer
    ) -> BatchPrefillWithPagedKVCacheWrapper:
        geometry, lengths = self._prepared()
        sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim_k)
        kind = (*sizes, layer.scale, layer.window, layer.soft_cap, query.dtype, cache[0].dtype)
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            if self._workspace is None:
                self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
            wrapper = self._wrappers[kind] = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        if kind not in self._planned:
            pages = _pages(geometry, lengths, layer.window)
            wrapper.plan(
                lengths.starts,
                pages.page_starts,
                pages.indices,
                pages.last_page_tokens,
                *sizes,
                geometry.block_size,
                causal=geometry.causal,
                sm_scale=layer.scale,
                window_left=-1 if layer.window is None else layer.window - 1,
                logits_soft_cap=layer.soft_cap or 0.0,
                q_data_type=query.dtype,
                kv_data_type=cache[0].dtype,
            )
            self._planned.add(kind)
        return wrapper

    def _prepared(self) -> tuple[BatchGeometry, Lengths]:
        if self._geometry is None or self._lengths is None:
            raise RuntimeError("prepare() must come before the first layer of a step")
        return self._geometry, self._lengths


def _lengths(geometry: BatchGeometry) -> Lengths:
    """Waits for the device."""
    requests = geometry.num_requests
    both = torch.cat((geometry.query_start_loc[: requests + 1], geometry.seq_lens[:requests])).cpu()
    return Lengths(both[: requests + 1], both[requests + 1 :])


def _pages(geometry: BatchGeometry, lengths: Lengths, window: int | None) -> Pages:
    """Without the blocks that are behind every query's window: `visible_blocks` of token_major.py says why."""
    size, seq_lens = geometry.block_size, lengths.seq_lens
    first = torch.zeros_like(seq_lens)
    if window is not None:
        first = blocks_behind(seq_lens, lengths.starts.diff(), window, size)
    end = (seq_lens + size - 1) // size
    counts = end - first
    page_starts = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    rows = torch.arange(len(seq_lens)).repeat_interleave(counts)
    columns = torch.arange(len(rows)) - page_starts[rows] + first[rows]
    device = geometry.block_table.device
    indices = geometry.block_table[rows.to(device), columns.to(device)]
    return Pages(page_starts, indices, seq_lens - (end - 1) * size)
