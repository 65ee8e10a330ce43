"""One step of attention over a paged cache, made up at random, and what must come of it: dense attention in float64.

Blocks lie in shuffled order. Every slot that nobody has written, and the whole null block, is NaN: whoever reads it
shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contracts.attention import AttentionBackend, AttentionLayer, BatchGeometry, CacheSpec, KVLayout, LayerCache


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, *, causal: bool = True
) -> Tensor:
    """float64 [q, H, Dv]: query [q, H, Dk] are the last q tokens of the context keys [n, KVH, Dk], values [n, KVH, Dv].

    Written out anew, so that core.layers.reference is not compared with itself.
    """
    group = layer.num_heads // layer.num_kv_heads
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,nhd->hqn", query.double(), keys) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    length = keys.shape[0]
    at_query, at_key = torch.arange(length - query.shape[0], length)[:, None], torch.arange(length)[None]
    if layer.alibi_slopes is not None:
        scores = scores + (at_key - at_query) * layer.alibi_slopes.double().cpu()[:, None, None]
    seen = torch.ones(query.shape[0], length, dtype=torch.bool)
    if causal:
        seen &= at_key <= at_query
    if layer.window is not None:
        seen &= at_key > at_query - layer.window
    scores = scores.masked_fill(~seen, float("-inf"))
    norm = scores.logsumexp(-1, keepdim=True)
    if layer.sinks is not None:
        norm = torch.logaddexp(norm, layer.sinks.double().cpu()[:, None, None])
    return torch.einsum("hqn,nhd->qhd", (scores - norm).exp(), values)


@dataclass
class PagedStep:
    """R requests with T new tokens in all. contexts: (new tokens, context length after them) of each request.

    query [T + padding, H, Dk]; key, value [T + padding, KVH, D] are views of one matrix, as a fused projection gives
    them: a token's heads are contiguous, tokens are strided. keys, values: each request's whole context, on the CPU,
    [length, KVH, D]. tables: the blocks of each request.
    """

    contexts: tuple[tuple[int, int], ...]
    layout: KVLayout
    spec: CacheSpec
    geometry: BatchGeometry
    cache: LayerCache
    query: Tensor
    key: Tensor
    value: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    tables: list[list[int]]

    def run(self, backend: AttentionBackend, layer: AttentionLayer) -> Tensor:
        """The backend's answer, [T + padding, H, Dv]."""
        backend.prepare(self.geometry)
        backend.write_kv(self.key, self.value, self.cache)
        return backend.forward(self.query, self.cache, layer)

    def expected(self, layer: AttentionLayer) -> Tensor:
        """float64 [T, H, Dv]."""
        rows, start = [], 0
        queries = self.query.cpu()
        for (new, _), keys, values in zip(self.contexts, self.keys, self.values, strict=True):
            query = queries[start : start + new]
            rows.append(dense_attention(query, keys, values, layer, causal=self.geometry.causal))
            start += new
        return torch.cat(rows)

    def rows_of(self, request: int) -> slice:
        """The rows of one request in the flat batch."""
        start = sum(new for new, _ in self.contexts[:request])
        return slice(start, start + self.contexts[request][0])

    def alone(self, request: int) -> PagedStep:
        """The same request, in the same blocks, without its batch mates."""
        rows = self.rows_of(request)
        key, value = (x.clone() for x in self.cache)
        return PagedStep(
            contexts=(self.contexts[request],),
            layout=self.layout,
            spec=self.spec,
            geometry=_geometry(
                (self.contexts[request],),
                [self.tables[request]],
                self.geometry.block_size,
                0,
                self.geometry.causal,
                self.query.device,
            ),
            cache=(key, value),
            query=self.query[rows],
            key=self.key[rows],
            value=self.value[rows],
            keys=[self.keys[request]],
            values=[self.values[request]],
            tables=[self.tables[request]],
        )


def make_paged_step(
    layout: KVLayout,
    layer: AttentionLayer,
    contexts: Sequence[tuple[int, int]],
    *,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    shared_blocks: int = 0,
    padding: int = 0,
    causal: bool = True,
    seed: int = 0,
    device: torch.device | str = "cpu",
    cache_dtype: torch.dtype | None = None,
) -> PagedStep:
    """A random step in `layout`, on `device`. cache_dtype: what keys and values are rounded to; None: `dtype`.

    shared_blocks: so many first blocks of the first request are those of the second, too: a prefix that was found in
    the cache. Both must have computed them before this step. padding: rows after the last token, which write nothing.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = [-(-length // block_size) for _, length in contexts]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    stored_as = cache_dtype or dtype
    sizes = layer.head_dim_k, layer.head_dim_v
    keys, values = (
        [normal(length, layer.num_kv_heads, size).to(stored_as).to(dtype) for _, length in contexts] for size in sizes
    )
    if shared_blocks:
        shared = shared_blocks * block_size
        tables[1][:shared_blocks] = tables[0][:shared_blocks]
        keys[1][:shared], values[1][:shared] = keys[0][:shared], values[0][:shared]
    spec = CacheSpec(
        "full" if layer.window is None else "window",
        layer.num_kv_heads,
        *sizes,
        str(stored_as).removeprefix("torch."),
        layer.window,
    )
    shapes = layout.shapes(spec, sum(counts) + 1, block_size)
    empty = [torch.full(shape, float("nan"), dtype=dtype) for shape in shapes]
    for stored, contents in zip(layout.views((empty[0], empty[1])), (keys, values), strict=True):
        for (new, length), table, content in zip(contexts, tables, contents, strict=True):
            position = torch.arange(length - new)
            blocks = torch.tensor(table)[position // block_size]
            stored[blocks, position % block_size] = content[: length - new]
    cache = (empty[0].to(stored_as).to(device), empty[1].to(stored_as).to(device))
    total = sum(new for new, _ in contexts)
    width = layer.num_kv_heads * layer.head_dim_k, layer.num_kv_heads * layer.head_dim_v
    both = [
        torch.cat((key[len(key) - new :].flatten(1), value[len(value) - new :].flatten(1)), dim=1)
        for key, value, (new, _) in zip(keys, values, contexts, strict=True)
    ]
    fused = torch.cat([*both, normal(padding, sum(width))]).to(device)
    return PagedStep(
        contexts=tuple(contexts),
        layout=layout,
        spec=spec,
        geometry=_geometry(contexts, tables, block_size, padding, causal, device),
        cache=cache,
        query=normal(total + padding, layer.num_heads, layer.head_dim_k).to(device),
        key=fused[:, : width[0]].view(-1, layer.num_kv_heads, layer.head_dim_k),
        value=fused[:, width[0] :].view(-1, layer.num_kv_heads, layer.head_dim_v),
        keys=keys,
        values=values,
        tables=tables,
    )


def _geometry(
    contexts: Sequence[tuple[int, int]],
    tables: list[list[int]],
    block_size: int,
    padding: int,
    causal: bool,
    device: torch.device | str,
) -> BatchGeometry:
    slots, starts = [], [0]
    for (new, length), table in zip(contexts, tables, strict=True):
        for position in range(length - new, length):
            slots.append(table[position // block_size] * block_size + position % block_size)
        starts.append(len(slots))
    width = max(map(len, tables)) + 1  # one more: a row is wider than what a request uses
    return BatchGeometry(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([length for _, length in contexts], dtype=torch.int32, device=device),
        block_table=torch.tensor(
            [table + [0] * (width - len(table)) for table in tables], dtype=torch.int32, device=device
        ),
        slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64, device=device),
        num_tokens=len(slots),
        num_requests=len(contexts),
        max_query_len=max(new for new, _ in contexts),
        max_seq_len=max(length for _, length in contexts),
        block_size=block_size,
        causal=causal,
    )
