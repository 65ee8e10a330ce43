"""Attention over a paged KV cache on a CPU: prefill, chunked prefill and decode in one kernel that reads blocks in place.

The context of a query is taken in chunks of 128 tokens, counted from token 0. Within a chunk: scores, their maximum, the
exponentials and their sum, the weighted sum of the values; then the chunk is merged into the row's running result. The
order of operations for a query position is therefore the same whatever else is in the batch, however the prompt was
chunked and whichever thread does it: the bits of a row depend on nothing but the row. All arithmetic is float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from hotswap.core.layers.jit import host_target

from .attention_code import PARAMS, TILE_ROWS, Shape, build
from .common import Native, compiled, dtype_name


@dataclass(frozen=True)
class AttentionPlan:
    """The work items of one step, the longest first, for every layer with `group` query heads per KV head.

    `items` is int32 [count, 2]: sequence and first row (query token * group + head of the group) of a tile.
    """

    items: torch.Tensor
    count: int
    group: int


def plan_attention(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, group: int) -> AttentionPlan:
    """Splits a step into items; once a step, from int32 CPU tensors query_start_loc [R + 1] and seq_lens [R].

    The order only balances threads: one long context does not start last.
    """
    starts = query_start_loc.numpy()
    rows = (starts[1:] - starts[:-1]) * np.int32(group)
    tiles = -(-rows // TILE_ROWS)
    if tiles.size == 0 or tiles.max() <= 1:
        seqs = np.flatnonzero(tiles).astype(np.int32)
        first_rows = np.zeros_like(seqs)
    else:
        seqs = np.repeat(np.arange(tiles.size, dtype=np.int32), tiles)
        first_rows = (np.arange(seqs.size, dtype=np.int32) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * TILE_ROWS
    # Later rows of a sequence see more of it, hence the small addend.
    cost = seq_lens.numpy()[seqs].astype(np.int64) * np.minimum(rows[seqs] - first_rows, TILE_ROWS) + first_rows
    order = np.argsort(-cost, kind="stable")
    items = np.stack((seqs[order], first_rows[order]), axis=1).astype(np.int32)
    return AttentionPlan(torch.from_numpy(items), len(items), group)


@functools.cache
def _native(shape: Shape) -> Native:
    return compiled(lambda: build(host_target(), shape), "paged_attention", PARAMS)


def _check(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, geometry: tuple[torch.Tensor, ...]
) -> None:
    _, heads, d = q.shape
    blocks, kv_heads, _, block_size = key_cache.shape
    if key_cache.shape != (blocks, kv_heads, d, block_size) or value_cache.shape != (blocks, kv_heads, block_size, d):
        raise ValueError(
            f"paged_attention: caches for heads of {d} are [blocks, kv_heads, D, block_size] and "
            f"[blocks, kv_heads, block_size, D], not {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if (
        key_cache.stride()[1:] != (d * block_size, block_size, 1)
        or value_cache.stride()[1:] != (d * block_size, d, 1)
        or key_cache.dtype is not value_cache.dtype
    ):
        raise ValueError("paged_attention: both caches must have one dtype and contiguous blocks")
    if heads % kv_heads:
        raise ValueError(f"paged_attention: {heads} query heads are no multiple of {kv_heads} KV heads")
    for tensor in geometry:
        if tensor.dtype is not torch.int32 or tensor.stride(-1) != 1:
            raise ValueError("paged_attention: query_start_loc, seq_lens and block_table must be int32, rows contiguous")


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
    """Attention of q [T, H, D] to the cached context of its sequences, as [T, H, D] of q's dtype.

    q: float32 or bfloat16; tokens may be strided (a view of the fused qkv output), each token contiguous.
    key_cache [blocks, KVH, D, block_size], value_cache [blocks, KVH, block_size, D]: float32 or bfloat16; H is a multiple
    of KVH. The keys and values of this step's tokens are already in the cache. Block sizes that are a multiple of 16 are
    read in place, others through a copy. query_start_loc int32 [R + 1]: the tokens of sequence r are
    query_start_loc[r] .. query_start_loc[r + 1] - 1, the last ones of its seq_lens[r] (int32 [R]) tokens of context.
    block_table int32 [R, >= ceil(seq_len / block_size)].
    causal: a token sees itself and earlier ones, else the whole context. window > 0: only the last `window` of those,
    itself included. soft_cap > 0: scores become soft_cap * tanh(score / soft_cap).
    plan: `plan_attention(...)` of the same query_start_loc and seq_lens, made here if not given.
    Tokens of `out` that belong to no sequence are left as they are. Raises ValueError or TypeError for what does not fit.
    """
    tokens, heads, d = q.shape
    kv_heads, block_size = key_cache.shape[1], key_cache.shape[3]
    _check(q, key_cache, value_cache, (query_start_loc, seq_lens, block_table))
    if out is None:
        out = torch.zeros((tokens, heads, d), dtype=q.dtype)
    for name, tensor in (("q", q), ("out", out)):
        if tensor.shape != (tokens, heads, d) or tensor.stride(2) != 1 or (tensor.stride(1) != d and heads != 1):
            raise ValueError(f"paged_attention: {name} must be [{tokens}, {heads}, {d}] with contiguous tokens")
    if out.dtype is not q.dtype:
        raise TypeError(f"paged_attention: out is {out.dtype}, q {q.dtype}")
    group = heads // kv_heads
    if plan is None:
        plan = plan_attention(query_start_loc, seq_lens, group)
    elif plan.group != group:
        raise ValueError(f"paged_attention: the plan is for groups of {plan.group} heads, not {group}")
    shape = Shape(d, block_size, group, dtype_name("paged_attention", q), dtype_name("paged_attention", key_cache))
    _native(shape)(
        q.data_ptr(),
        out.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        block_table.data_ptr(),
        plan.items.data_ptr(),
        plan.count,
        kv_heads,
        q.stride(0),
        out.stride(0),
        block_table.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        int(causal),
        window,
        scale,
        soft_cap,
        torch.get_num_threads() if threads is None else threads,
    )
    return out
