"""The op `gather_logprobs`: each chunk gives the sum of its exponentials, how many of its logits are greater than the
chosen one, and its best places; a last program a row puts them together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotswap.core.layers.sampling.slices import SORTED, slices

from .launch import next_power_of_two
from .sampling_rows import begin, place_id, place_key, place_order, rows_of, value_of

MAX_LISTED = 32  # alternatives found chunk by chunk; for more, rows are sorted
NOTHING = tl.constexpr(-(2**63))  # below every place key
FLOOR = tl.constexpr(-9999.0)  # see the reference


@triton.jit(do_not_specialize=["chosen", "count"])
def _chunk_kernel(  # type: ignore[no-untyped-def]
    logits,
    chosen,
    best,
    sums,
    greater,
    places,
    count,
    stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    program = tl.program_id(0).to(tl.int64)
    row = logits + (program // CHUNKS) * stride
    ids = (program % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
    inside = ids < WIDTH
    values = tl.load(row + ids, mask=inside, other=float("-inf"))
    order = tl.where(inside, place_key(values, ids), NOTHING)
    first = tl.max(order, 0)
    top = value_of(place_order(first))
    # A chunk of minus infinities adds nothing. A NaN is the top of its chunk, and spreads from there.
    weights = tl.exp(values - tl.where(top == float("-inf"), 0.0, top))
    tl.store(best + program, top)
    tl.store(sums + program, tl.sum(weights.to(tl.float64), 0))
    asked = tl.load(row + tl.load(chosen + program // CHUNKS))
    tl.store(greater + program, tl.sum((values > asked).to(tl.int64), 0))
    place = 0
    while place < count:
        tl.store(places + program * LISTED + place, first)
        order = tl.where(order == first, NOTHING, order)
        first = tl.max(order, 0)
        place += 1


@triton.jit(do_not_specialize=["chosen", "count", "columns"])
def _row_kernel(  # type: ignore[no-untyped-def]
    logits,
    chosen,
    best,
    sums,
    greater,
    places,
    out_ids,
    out_logprobs,
    out_ranks,
    count,
    columns,
    stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED)
    held = chunk < CHUNKS
    tops = tl.load(best + row * CHUNKS + chunk, mask=held, other=float("-inf"))
    top = value_of(place_order(tl.max(place_key(tops, chunk), 0))).to(tl.float64)
    parts = tl.load(sums + row * CHUNKS + chunk, mask=held, other=0.0)
    # exp(-inf - -inf) is NaN; a chunk without a sum is not asked.
    scaled = tl.where(parts == 0.0, 0.0, parts * tl.exp(tops.to(tl.float64) - top))
    normalizer = top + tl.log(tl.sum(scaled, 0))

    asked = tl.load(chosen + row)
    logprob = tl.load(logits + row * stride + asked).to(tl.float64) - normalizer
    rank = 1 + tl.sum(tl.load(greater + row * CHUNKS + chunk, mask=held, other=0), 0)
    out = row * columns
    tl.store(out_ids + out, asked)
    tl.store(out_logprobs + out, tl.where(logprob >= FLOOR, logprob, FLOOR))
    tl.store(out_ranks + out, rank)

    listed = tl.arange(0, PADDED * LISTED)
    present = (listed < CHUNKS * LISTED) & (listed % LISTED < count)
    order = tl.load(places + row * CHUNKS * LISTED + listed, mask=present, other=NOTHING)
    rank = tl.zeros_like(rank)
    before = tl.zeros_like(rank) - 1  # of no order key
    place = 0
    while place < count:
        first = tl.max(order, 0)
        order = tl.where(order == first, NOTHING, order)
        key = place_order(first)
        rank = tl.where(key.to(tl.int64) == before, rank, place + 1)
        before = key.to(tl.int64)
        logprob = value_of(key).to(tl.float64) - normalizer
        tl.store(out_ids + out + 1 + place, place_id(first))
        tl.store(out_logprobs + out + 1 + place, tl.where(logprob >= FLOOR, logprob, FLOOR))
        tl.store(out_ranks + out + 1 + place, rank)
        place += 1


def gather_logprobs(
    logits: Tensor, chosen: Tensor, count: int, *, chunk: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The op of that name. chunk: columns of a program, for tests."""
    rows = rows_of(logits, chunk)
    asked = min(count, rows.width)
    listed = asked if asked <= MAX_LISTED else 1
    shape, device = rows.shape(), logits.device
    columns = 1 + listed
    ids = torch.empty((rows.count, columns), dtype=torch.int64, device=device)
    logprobs = torch.empty((rows.count, columns), dtype=torch.float64, device=device)
    ranks = torch.empty((rows.count, columns), dtype=torch.int64, device=device)
    if rows.count:
        by_chunk = (rows.count, rows.chunks)
        best = torch.empty(by_chunk, dtype=torch.float32, device=device)
        sums = torch.empty(by_chunk, dtype=torch.float64, device=device)
        greater = torch.empty(by_chunk, dtype=torch.int64, device=device)
        places = torch.empty((*by_chunk, MAX_LISTED), dtype=torch.int64, device=device)
        found, stride = (best, sums, greater, places), rows.logits.stride(0)
        _chunk_kernel[rows.by_chunk](rows.logits, chosen, *found, listed, stride, LISTED=MAX_LISTED, **shape)
        shape.update(PADDED=next_power_of_two(rows.chunks), LISTED=MAX_LISTED, num_warps=4)
        del shape["WIDTH"], shape["CHUNK"]
        _row_kernel[(rows.count,)](rows.logits, chosen, *found, ids, logprobs, ranks, listed, columns, stride, **shape)
    if asked == listed:
        return ids, logprobs, ranks
    return _with_sorted(rows.logits, asked, ids, logprobs, ranks)


def _with_sorted(
    logits: Tensor, count: int, ids: Tensor, logprobs: Tensor, ranks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A long list of alternatives, out of whole rows sorted, a few at a time. ids, logprobs, ranks: [S, 2], the chosen token
    and the best."""
    size = (len(logits), 1 + count)
    all_ids, all_logprobs, all_ranks = (
        torch.empty(size, dtype=given.dtype, device=given.device) for given in (ids, logprobs, ranks)
    )
    for part in slices(len(logits), logits.shape[1], SORTED):
        values, order = torch.sort(logits[part], dim=1, descending=True, stable=True)
        values, order = values[:, :count], order[:, :count]
        below = values.to(torch.float64) - values[:, :1].to(torch.float64) + logprobs[part, 1:]
        below = below.nan_to_num_(FLOOR.value, FLOOR.value, FLOOR.value).clamp_(min=FLOOR.value)
        # A rank is the place of the first of equal ones.
        place = torch.arange(1, count + 1, device=logits.device).expand_as(order)
        fresh = torch.ones_like(order, dtype=torch.bool)
        fresh[:, 1:] = values[:, 1:] != values[:, :-1]
        listed = (place * fresh).cummax(1).values
        for whole, first, others in (
            (all_ids, ids, order),
            (all_logprobs, logprobs, below),
            (all_ranks, ranks, listed),
        ):
            whole[part, :1] = first[part, :1]
            whole[part, 1:] = others
    return all_ids, all_logprobs, all_ranks
