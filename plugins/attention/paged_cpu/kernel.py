"""Attention over a paged KV cache on a CPU: prefill, chunked prefill and decode in one kernel that reads blocks in
place.

The context of a query is taken in chunks of 128 tokens, counted from token 0. Within a chunk: scores, their maximum,
the exponentials and their sum, the weighted sum of the values; then the chunk is merged into the row's running result.
The order of operations for a query position is therefore the same whatever else is in the batch, however the prompt was
chunked and whichever thread does it: the bits of a row depend on nothing but the row. All arithmetic is float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from hotswap.core.layers.jit import Target, host_target, team_size
from hotswap.core.layers.jit.native import DTYPES, Native, compiled
from hotswap.core.layers.jit.paged_cache import PagedCache

from .kernel_code import PARAMS, TILE_ROWS, Shape, build

# Below this many multiplications a second thread costs more than it brings.
_SERIAL_PRODUCTS = 64 * 1024


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step as every layer with `group` query heads per KV head sees it; keeps the tensors that it points into.

    `items` is int32 [count, 2], the longest first: sequence and first row (query token * group + head of the group).
    `work` is about the number of (row, context token) pairs for each KV head.
    """

    tensors: tuple[torch.Tensor, ...]
    items: torch.Tensor
    group: int
    tokens: int
    count: int
    work: int
    addresses: tuple[int, int, int, int]
    table_stride: int


def plan_attention(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, group: int
) -> AttentionPlan:
    """Checks a step's geometry and splits it into items; once a step, for all layers of one group size.

    query_start_loc int32 [R + 1]: the tokens of sequence r are query_start_loc[r] .. query_start_loc[r + 1] - 1, the
    last ones of its seq_lens[r] (int32 [R]) tokens of context. block_table int32 [R, >= ceil(seq_len / block_size)],
    rows may be strided. The values are read now and by each call: do not change them in between.
    """
    for name, tensor in (("query_start_loc", query_start_loc), ("seq_lens", seq_lens), ("block_table", block_table)):
        if tensor.dtype is not torch.int32 or tensor.stride(-1) != 1:
            raise ValueError(
                f"attention: {name} must be int32 with contiguous rows, not {tensor.dtype} {tensor.stride()}"
            )
    starts, lengths = query_start_loc.numpy(), seq_lens.numpy()
    if len(starts) != len(lengths) + 1 or block_table.shape[0] < len(lengths):
        raise ValueError(
            f"attention: query_start_loc [{len(starts)}], seq_lens [{len(lengths)}] and block_table "
            f"{tuple(block_table.shape)} must be [R + 1], [R] and [R, blocks]"
        )
    rows = (starts[1:] - starts[:-1]) * np.int32(group)
    tiles = -(-rows // TILE_ROWS)
    seqs = np.arange(tiles.size, dtype=np.int32).repeat(tiles)
    first_rows = (np.arange(seqs.size, dtype=np.int32) - (tiles.cumsum(dtype=np.int32) - tiles)[seqs]) * np.int32(
        TILE_ROWS
    )
    # What a tile costs: its rows times the context; later tiles of a sequence see more of it, hence the small addend.
    cost = lengths[seqs].astype(np.int64) * np.minimum(rows[seqs] - first_rows, TILE_ROWS) + first_rows
    order = (-cost).argsort(kind="stable")
    items = torch.empty((seqs.size, 2), dtype=torch.int32)
    view = items.numpy()
    view[:, 0] = seqs[order]
    view[:, 1] = first_rows[order]
    return AttentionPlan(
        tensors=(query_start_loc, seq_lens, block_table),
        items=items,
        group=group,
        tokens=int(starts[-1]),
        count=seqs.size,
        work=int(cost.sum()),
        addresses=(query_start_loc.data_ptr(), seq_lens.data_ptr(), block_table.data_ptr(), items.data_ptr()),
        table_stride=block_table.stride(0),
    )


@functools.cache
def _native(target: Target, shape: Shape) -> Native:
    return compiled(lambda: build(target, shape), "paged_attention", PARAMS)


class PagedAttention:
    """Attention of one layer, checked and compiled once; a call costs a few microseconds of Python.

    causal: a token sees itself and earlier ones, else the whole context. window > 0: only the last `window` of those,
    itself included. soft_cap > 0: scores become soft_cap * tanh(score / soft_cap). Block sizes that are a multiple of
    16 are read in place, others through a copy.
    """

    def __init__(
        self,
        heads: int,
        cache: PagedCache,
        scale: float,
        dtype: torch.dtype,
        *,
        causal: bool = True,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> None:
        """`dtype` is that of queries and output. Raises ValueError if heads is no multiple of the cache's KV heads."""
        if heads % cache.kv_heads:
            raise ValueError(f"attention: {heads} query heads are no multiple of {cache.kv_heads} KV heads")
        if dtype not in DTYPES:
            raise TypeError(f"attention: queries must be float32 or bfloat16, not {dtype}")
        self.heads = heads
        self.group = heads // cache.kv_heads
        self.cache = cache
        self.dtype = dtype
        self._width = heads * cache.d
        self._native = _native(host_target(), Shape(cache.d, cache.block_size, self.group, DTYPES[dtype], cache.dtype))
        self._options = (int(causal), window, scale, soft_cap)

    def __call__(
        self, q: torch.Tensor, plan: AttentionPlan, out: torch.Tensor, *, threads: int | None = None
    ) -> torch.Tensor:
        """Writes `out` and returns it. q: [T, H, D], or [T, >= H * D] with the queries in front, such as the fused qkv
        output; out: [T, H, D] or [T, H * D]. Tokens may be strided, each must be contiguous.

        Tokens of `out` that belong to no sequence are left as they are.
        """
        cache, tokens = self.cache, plan.tokens
        if q.dtype is not self.dtype or out.dtype is not self.dtype or plan.group != self.group:
            raise TypeError(
                f"attention: made for {self.dtype} and groups of {self.group} heads, called with q {q.dtype}, "
                f"out {out.dtype} and a plan for groups of {plan.group}"
            )
        for tensor in (q, out):
            strides = tensor.stride()
            if tensor.shape[0] < tokens or strides[-1] != 1 or (tensor.dim() == 3 and strides[1] != cache.d != 1):
                raise ValueError(
                    f"attention: q and out must hold {tokens} contiguous tokens, not {tuple(tensor.shape)} {strides}"
                )
        ldq, ldo = q.stride(0), out.stride(0)
        if tokens > 1 and (ldq < self._width or ldo < self._width):
            raise ValueError(
                f"attention: tokens of q and out must be {self._width} apart at least, not {ldq} and {ldo}"
            )
        self._native(
            q.data_ptr(),
            out.data_ptr(),
            cache.key_address,
            cache.value_address,
            *plan.addresses,
            plan.count,
            cache.kv_heads,
            ldq,
            ldo,
            plan.table_stride,
            cache.key_block,
            cache.value_block,
            *self._options,
            1 if plan.work * cache.kv_heads * cache.d < _SERIAL_PRODUCTS else team_size(threads),
        )
        return out


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    *,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """Attention of q [T, H, D] to the cached context of its sequences, as [T, H, D] of q's dtype, in one call.

    q: float32 or bfloat16. The keys and values of this step's tokens are already in the cache (see `PagedCache`). The
    geometry is that of `plan_attention`, the options those of `PagedAttention`. For many calls make those objects once.
    Raises ValueError or TypeError for what does not fit.
    """
    tokens, heads, d = q.shape
    cache = PagedCache.of(key_cache, value_cache)
    if d != cache.d:
        raise ValueError(f"attention: q has heads of {d}, the cache of {cache.d}")
    if out is None:
        out = torch.zeros((tokens, heads, d), dtype=q.dtype)
    layer = PagedAttention(heads, cache, scale, q.dtype, causal=causal, window=window, soft_cap=soft_cap)
    if plan is None:
        plan = plan_attention(query_start_loc, seq_lens, block_table, layer.group)
    return layer(q, plan, out, threads=threads)
