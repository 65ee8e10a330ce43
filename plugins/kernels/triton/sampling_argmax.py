"""The op `argmax`: the best place of each chunk, then of each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_two
from .sampling_rows import begin, place_id, place_key, rows_of

NOTHING = tl.constexpr(-(2**63))  # below every place key


@triton.jit(do_not_specialize=["places"])
def _chunk_kernel(  # type: ignore[no-untyped-def]
    logits,
    places,
    stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    program = tl.program_id(0).to(tl.int64)
    ids = (program % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
    inside = ids < WIDTH
    values = tl.load(logits + (program // CHUNKS) * stride + ids, mask=inside, other=0.0)
    tl.store(places + program, tl.max(tl.where(inside, place_key(values, ids), NOTHING), 0))


@triton.jit(do_not_specialize=["places", "best", "found"])
def _row_kernel(  # type: ignore[no-untyped-def]
    logits,
    places,
    best,
    found,
    stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED)
    place = tl.max(tl.load(places + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=NOTHING), 0)
    tl.store(found + row, place_id(place))
    tl.store(best + row, tl.load(logits + row * stride + place_id(place)))


def argmax(logits: Tensor, *, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """The op of that name. chunk: columns of a program, for tests."""
    rows = rows_of(logits, chunk)
    shape = rows.shape()
    best = torch.empty(rows.count, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows.count, dtype=torch.int64, device=logits.device)
    if not rows.count:
        return best, ids
    places = torch.empty((rows.count, rows.chunks), dtype=torch.int64, device=logits.device)
    stride = rows.logits.stride(0)
    _chunk_kernel[rows.by_chunk](rows.logits, places, stride, **shape)
    shape.update(num_warps=1, PADDED=next_power_of_two(rows.chunks))
    del shape["WIDTH"], shape["CHUNK"]
    _row_kernel[(rows.count,)](rows.logits, places, best, ids, stride, **shape)
    return best, ids
