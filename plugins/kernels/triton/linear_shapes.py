"""The launch shapes of products: measured ones for known matrices, a rule for all others.

`benchmarks/gpu/linear.py` measures candidates on a card and prints the table's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from .launch import ceil_div, next_power_of_two

Capability = tuple[int, int]


class Early(IntEnum):
    """What a `Dot` program does before it waits for x: nothing; load its first block of weights into registers; bring
    the first bytes of each of its weight rows into the level 2 cache, line by line or a row at once."""

    NOTHING = 0
    REGISTERS = 1
    LINES = 2
    BULK = 3


@dataclass(frozen=True, slots=True)
class Matvec:
    """Plain arithmetic, for up to 4 rows of x: block_n weight rows by block_k columns at a time."""

    block_n: int
    block_k: int
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Dot:
    """Matrix units. K is summed in `segments` pieces that are added in order, by as many programs side by side when
    `split` is set, else by one. w_first: weights are the left operand, so that 64 of their rows fill a matrix
    instruction whatever the number of tokens. early_bytes: a power of two from 128 on, for LINES and BULK."""

    block_t: int
    block_n: int
    block_k: int
    segments: int = 1
    split: bool = True
    warps: int = 4
    stages: int = 4
    w_first: bool = True
    early: Early = Early.LINES
    early_bytes: int = 512


@dataclass(frozen=True, slots=True)
class Gated:
    """A tile of `gated_linear`: block_t rows of x by block_i columns of gate and as many of up, block_k of K at a time. band:
    tiles of rows that are walked together."""

    block_t: int = 128
    block_i: int = 128
    block_k: int = 64
    band: int = 8
    warps: int = 8
    stages: int = 4


Shape = Matvec | Dot
Row = tuple[int, Shape | None]  # up to so many tokens; None: torch's library

MATVEC_TOKENS = 4
SMALL = 1 << 22  # elements: a matrix whose product takes less than the launch of two kernels
GATED_TOKENS = 2048  # from so many rows on, and from so large a matrix on, the fused product is the faster one
GATED_SIZE = 1 << 22
MOST_ROWS = 16  # tiles of rows up to which all are walked together
ADDING_TOKENS = 1024  # from so many rows on a product that begins at the residual is the faster one
_ALIGNED = 8  # elements: rows of tensor maps begin at multiples of 16 bytes
_LARGE_TOKENS = 64  # up to here the rule takes our kernels for large matrices, whose weights then are what takes time
_SMALL_TOKENS = 256
_TILES = ((64, 128), (64, 64), (32, 64), (32, 32), (16, 32))


def shape_for(capability: Capability, n: int, k: int, tokens: int, num_sms: int, itemsize: int = 2) -> Shape | None:
    """How to multiply `tokens` rows by a weight [n, k] of elements of `itemsize` bytes; None: by torch's library.

    capability: the device's, (0, 0) for other than NVIDIA's. The answer is one of a few for each matrix, so that few
    variants are compiled.
    """
    from .linear_table import TABLE  # it is written in this module's terms

    known = TABLE.get(capability, {}).get((n, k)) if itemsize == 2 else None
    if known is not None:
        return next((shape for most, shape in known if tokens <= most), None)
    if tokens <= MATVEC_TOKENS:
        return _matvec(n, k, tokens, num_sms)
    if n * k <= SMALL and tokens <= _SMALL_TOKENS:
        return _small(capability, n, k, tokens, num_sms, itemsize)
    if tokens <= _LARGE_TOKENS:
        return _streaming(capability, n, k, tokens, num_sms, itemsize)
    return None


def gated_shape(capability: Capability, width: int, k: int, tokens: int) -> Gated | None:
    """How to multiply `tokens` rows of 2-byte elements by a weight [2 * width, k] with the activation behind it; None: in two
    steps. Only Hopper's matrix units and tensor maps have been measured."""
    fits = k % _ALIGNED == 0 and width % _ALIGNED == 0
    if capability != (9, 0) or not fits or tokens < GATED_TOKENS or width * k < GATED_SIZE:
        return None
    shape = Gated()
    rows = ceil_div(tokens, shape.block_t)
    return replace(shape, band=rows) if rows <= MOST_ROWS else shape


def fixed_shape(capability: Capability, n: int, k: int, tokens: int, num_sms: int, itemsize: int) -> Dot:
    """One for every number of tokens, so that a row's bits never depend on it. Only who adds the segments does: side by
    side they fill the device, one after the other they need no memory in between."""
    segments = min(ceil_div(2 * num_sms, ceil_div(n, 128)), ceil_div(k, 512), 8)
    block_n, block_k = (128, 64) if itemsize == 2 else (64, 32)  # sums of a wider one would not fit into registers
    shape = Dot(64, block_n, block_k, segments, split=tokens <= 64)
    return replace(shape, stages=_stages(capability, shape, itemsize))


def _matvec(n: int, k: int, tokens: int, num_sms: int) -> Matvec:
    """All of a row at once if that is possible: then all weights are on their way before x is there."""
    elements = 8192 if tokens == 1 else 4096
    block_k = max(min(next_power_of_two(k), 4096 if tokens == 1 and k <= 4096 else 2048), 8)
    block_n = min(max(elements // block_k, 1), 8)
    while block_n > 1 and n < 4 * num_sms * block_n:
        block_n //= 2
    return Matvec(block_n, block_k)


def _small(capability: Capability, n: int, k: int, tokens: int, num_sms: int, itemsize: int) -> Dot:
    """The largest tile that still gives every multiprocessor one; no split, whose second step costs more."""
    rows = _rows(tokens)
    fitting = [(t, width) for t, width in _TILES if t <= rows]
    full = [tile for tile in fitting if ceil_div(tokens, tile[0]) * ceil_div(n, tile[1]) >= num_sms]
    block_t, block_n = (full or fitting[-1:])[0]
    shape = Dot(block_t, block_n, 64, w_first=block_n >= 64, early_bytes=1024)
    return replace(shape, stages=_stages(capability, shape, itemsize))


def _streaming(capability: Capability, n: int, k: int, tokens: int, num_sms: int, itemsize: int) -> Dot:
    """About one program on each multiprocessor where the matrix is small enough for that, else two, each with as much of its
    weights on the way as shared memory holds. Measured rows look like that."""
    columns = ceil_div(n, 64)
    segments = max(1, min(round(num_sms / columns), ceil_div(k, 512), 16))
    alone = 2 * columns * segments <= 3 * num_sms
    shape = Dot(_rows(tokens), 64, 256 if alone else 128, segments)
    return replace(shape, stages=_stages(capability, shape, itemsize, programs=1 if alone else 2))


def _rows(tokens: int) -> int:
    return min(max(next_power_of_two(tokens), 16), 64)


def _stages(capability: Capability, shape: Dot, itemsize: int, programs: int = 2) -> int:
    """As many blocks on the way as the share of shared memory holds that so many programs on a multiprocessor leave."""
    memory = ({(8, 0): 160, (9, 0): 220, (10, 0): 220}.get(capability, 96) << 10) // programs
    stage = (shape.block_t + shape.block_n) * shape.block_k * itemsize
    return min(max(memory // stage, 2), 6)
