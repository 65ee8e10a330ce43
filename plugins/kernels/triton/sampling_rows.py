"""What the sampling kernels share: rows of logits cut into chunks, and the order of logits as unsigned numbers.

A program takes a chunk of a row, so that one row too keeps the device busy, and a last program a row puts the chunks'
results together. Chunks do not depend on the number of rows, and what is added up is either whole numbers, whose sums have
no order, or added in a fixed order: a row's result has the same bits in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, interpreting, next_power_of_two, pdl_options, warps_for

CHUNK = 4096  # columns of a program
PER_THREAD = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """float32 logits [S, V] with contiguous rows, and how they are cut."""

    logits: Tensor
    count: int
    width: int
    chunk: int

    @property
    def chunks(self) -> int:
        return ceil_div(self.width, self.chunk)

    @property
    def by_chunk(self) -> tuple[int]:
        """The grid of a launch with a program for each chunk of each row: one dimension, the others end at 65,535."""
        return (self.count * self.chunks,)

    def shape(self) -> dict[str, Any]:
        """What every launch is told, apart from its tensors."""
        return {
            "WIDTH": self.width,
            "CHUNK": self.chunk,
            "CHUNKS": self.chunks,
            "num_warps": warps_for(self.chunk, PER_THREAD),
            **pdl_options(_use_pdl(self.logits.device)),
        }


def rows_of(logits: Tensor, chunk: int | None) -> Rows:
    """chunk: for tests; None: CHUNK."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count, width = logits.shape
    return Rows(logits, count, width, min(chunk or CHUNK, next_power_of_two(width)))


@lru_cache
def _use_pdl(device: torch.device) -> bool:
    """Whether kernels are launched with programmatic dependent launch (see launch.py)."""
    if device.type != "cuda" or torch.version.hip is not None or interpreting():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def begin(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first line of every kernel."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def order_key(values):  # type: ignore[no-untyped-def]
    """uint32 in the order of float32 values; -0.0 equals 0.0. A NaN is above or below all others."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def value_of(key):  # type: ignore[no-untyped-def]
    """The float32 value of an order key."""
    return tl.where(key >= 0x80000000, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def place_key(values, ids):  # type: ignore[no-untyped-def]
    """int64 in the order of float32 values, equal ones the lowest id last; a NaN is above all others."""
    key = tl.where(values == values, order_key(values), 0xFFFFFFFF)
    return ((key.to(tl.int64) - 0x80000000) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def place_id(place):  # type: ignore[no-untyped-def]
    """The id in a place key."""
    return 0xFFFFFFFF - (place & 0xFFFFFFFF)


@triton.jit
def place_order(place):  # type: ignore[no-untyped-def]
    """The order key, uint32, in a place key."""
    return ((place >> 32) + 0x80000000).to(tl.uint32)
