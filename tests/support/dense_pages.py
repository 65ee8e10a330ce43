"""Attention over a paged cache by plain torch, with the manners of the kernels that the fakes in fake_kernels/ stand for.

Keys and values that lie after a context are not read. Those before a window, in a tile that has visible ones, are: they get a
weight of zero, so a NaN among the values comes through.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    *,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    soft_cap: float,
) -> Tensor:
    """query [T, H, D]; keys, values [pages, page size, KVH, D]; starts int32 [R + 1]; seq_lens int32 [R]; table int32
    [R, columns] -> [T, H, D]; rows that no request owns are NaN. left, right: keys seen before and after the
    query's own, -1: all.
    """
    _check(query, keys, values)
    for lengths in (starts, seq_lens, table):
        assert lengths.dtype == torch.int32 and lengths.stride(-1) == 1
    assert len(starts) == len(seq_lens) + 1 == len(table) + 1
    out = torch.full((len(query), query.shape[1], values.shape[3]), float("nan"), dtype=query.dtype)
    for request, length in enumerate(seq_lens.tolist()):
        first, last = starts[request : request + 2].tolist()
        pages = table[request, : -(-length // keys.shape[1])].long()
        context = [stored[pages].flatten(0, 1)[:length].float() for stored in (keys, values)]
        group = query.shape[1] // keys.shape[2]
        key, value = (x.repeat_interleave(group, 1) for x in context)
        scores = torch.einsum("qhd,nhd->hqn", query[first:last].float(), key) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        seen = _seen(last - first, length, causal=causal, left=left, right=right)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqn,nhd->qhd", weights, value).to(query.dtype)
    return out


def _check(query: Tensor, keys: Tensor, values: Tensor) -> None:
    assert query.dim() == 3 and keys.dim() == values.dim() == 4
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.dtype == keys.dtype == values.dtype
    assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    assert query.shape[2] == keys.shape[3] and query.shape[1] % keys.shape[2] == 0


def _seen(queries: int, length: int, *, causal: bool, left: int, right: int) -> Tensor:
    """bool [queries, length]: the last query stands at the context's last key."""
    if causal:
        right = 0
    distance = torch.arange(length)[None] - torch.arange(length - queries, length)[:, None]
    seen = torch.ones(queries, length, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen
