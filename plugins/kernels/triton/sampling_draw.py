"""The op `draw` without sorting: what top_k and top_p keep is found digit by digit in the order keys of the logits.

Probabilities are whole numbers here: a token weighs exp((logit - best) / T) in units of 2**-44 or so (`_unit`). Sums of
whole numbers have no order, so they are exact whoever adds them, and a row's draw has the same bits in every batch. What
is cut off weighs less than 2**-26 of the best token, over all of the largest vocabulary.

1. `_count_kernel`, 4 times: histograms of 8 bits of the keys, each among the keys that share what was found before; the
   digits of the k-th largest key. Rows without top_k leave at once.
2. `_mass_kernel`, 11 times: likewise the weight under each of 8 digits (3 bits), which gives the key at which the best
   tokens together reach top_p. The first round gives the total as well. Rows without top_p keep everything here.
3. `_pick_kernel`: a program a row; the chunk, then the token, at which the weight kept, in vocabulary order, exceeds the
   noise. Of tokens equal to the last key kept, only the first few are.
Without top_k and top_p there is one round over the logits, `_sum_kernel`, before the last step. Each program works out what
the round before has found (a few numbers a row) by itself, so rounds need no launch in between.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import next_power_of_two
from .sampling_rows import Rows, begin, order_key, rows_of, value_of

ALWAYS = tl.constexpr(2**62)  # a top_k that keeps everything

COUNT_BITS = tl.constexpr(8)
COUNT_BINS = tl.constexpr(256)
COUNT_ROUNDS = tl.constexpr(4)
MASS_BITS = tl.constexpr(3)
MASS_BINS = tl.constexpr(8)
MASS_ROUNDS = tl.constexpr(11)

# What varies from step to step; tensors of one number a row may begin anywhere in a buffer of others.
_VARYING = ("best", "temperature", "min_p", "top_k", "top_p", "seeds", "positions", "out", "has_min_p", "turn")

_WEYL = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLY_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(bits):  # type: ignore[no-untyped-def]
    """SplitMix64's finalizer of uint64 (see core/layers/sampling/noise.py)."""
    bits = (bits ^ (bits >> 30)) * _MULTIPLY_1
    bits = (bits ^ (bits >> 27)) * _MULTIPLY_2
    return bits ^ (bits >> 31)


@triton.jit
def _uniform(seed, position):  # type: ignore[no-untyped-def]
    """float64 in [0, 1), that of `noise.uniform`."""
    seed, position = seed.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True)
    bits = _mix(_mix(seed + _WEYL) + (position + 1) * _WEYL)
    return (bits >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def _weights(values, best, temperature, least, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """int64: what tokens weigh in units of 1 / UNIT, the best one UNIT; 0 for less than `least`, and for NaN."""
    depth = tl.div_rn(values - best, temperature)
    weights = tl.exp(tl.where(depth > -200.0, depth, -200.0))  # exp(-200) is 0 in float32
    return (tl.where(weights >= least, weights, 0.0) * UNIT).to(tl.int64)


@triton.jit
def _digit_reaching(bins, wanted, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(digit, rest): counted from the highest digit down, the one at which the sum of bins int64 [BINS] reaches
    `wanted`, 0 when none does, and how much of that bin it takes."""
    index = tl.arange(0, BINS)
    from_top = tl.cumsum(bins, 0, reverse=True)
    digit = tl.maximum(tl.sum((from_top >= wanted).to(tl.int32), 0) - 1, 0)
    return digit, wanted - tl.sum(tl.where(index == digit, from_top - bins, 0), 0)


@triton.jit
def _count_state(counts, states, row, turn):  # type: ignore[no-untyped-def]
    """(prefix, rest, bins): what round turn - 1 of the counting has found: the leading digits of the k-th largest key,
    its place among the keys that begin so, and how many keys had each of the last digits."""
    prefix = tl.load(states + row * 2 * COUNT_ROUNDS + (turn - 1) * 2)
    wanted = tl.load(states + row * 2 * COUNT_ROUNDS + (turn - 1) * 2 + 1)
    held = counts + (row * COUNT_ROUNDS + turn - 1) * COUNT_BINS + tl.arange(0, COUNT_BINS)
    bins = tl.load(held).to(tl.int64)
    digit, rest = _digit_reaching(bins, wanted, COUNT_BINS)
    here = tl.sum(tl.where(tl.arange(0, COUNT_BINS) == digit, bins, 0), 0)
    return prefix * COUNT_BINS + digit, rest, here


@triton.jit(do_not_specialize=_VARYING)
def _count_kernel(  # type: ignore[no-untyped-def]
    logits,
    best,
    temperature,
    min_p,
    top_k,
    counts,  # int32 [D, COUNT_ROUNDS, COUNT_BINS], zeros at first
    states,  # int64 [D, COUNT_ROUNDS, 2]: prefix and rest that each round begins with
    has_min_p,
    turn,
    stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    k = tl.load(top_k + row)
    if k < ALWAYS:
        prefix, rest = k * 0, k
        if turn > 0:
            prefix, rest, _ = _count_state(counts, states, row, turn)
        if chunk == 0:
            tl.store(states + row * 2 * COUNT_ROUNDS + turn * 2, prefix)
            tl.store(states + row * 2 * COUNT_ROUNDS + turn * 2 + 1, rest)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = ids < WIDTH
        values = tl.load(logits + row * stride + ids, mask=inside, other=0.0)
        shift = (32 - (turn + 1) * COUNT_BITS).to(tl.uint32)
        key = order_key(values) >> shift
        inside &= (key >> COUNT_BITS) == prefix.to(tl.uint32)
        if tl.max(inside.to(tl.int32), 0) > 0:
            if has_min_p != 0:
                least = tl.load(min_p + row)
                weights = _weights(values, tl.load(best + row), tl.load(temperature + row), least, UNIT)
                inside &= weights > 0
            digits = (key & (COUNT_BINS - 1)).to(tl.int32)
            found = tl.histogram(digits, COUNT_BINS, mask=inside)
            at = counts + (row * COUNT_ROUNDS + turn) * COUNT_BINS + tl.arange(0, COUNT_BINS)
            tl.atomic_add(at, found, mask=found > 0, sem="relaxed")


@triton.jit
def _cut(counts, states, row, k, best, temperature, least, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(limit, excess): the k-th largest key of a row, and the weight of the keys equal to it that are not kept."""
    limit, excess = k * 0, k * 0
    if k < ALWAYS:
        limit, kept, equal = _count_state(counts, states, row, COUNT_ROUNDS)
        weight = _weights(value_of(limit.to(tl.uint32)), best, temperature, least, UNIT)
        excess = tl.maximum(equal - kept, 0) * weight
    return limit, excess


@triton.jit
def _reach(total, top_p):  # type: ignore[no-untyped-def]
    """int64: the weight that the kept tokens are to reach, all of it where top_p is off."""
    whole = total.to(tl.float64)
    return tl.minimum(tl.ceil(tl.minimum(top_p * whole, whole)).to(tl.int64), total)


@triton.jit
def _chunk_bins(masses, row, turn, CHUNKS: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """int64 [PADDED, MASS_BINS]: what a round has found in each chunk of a row."""
    chunk = tl.arange(0, PADDED)[:, None]
    at = masses + (row * 2 + turn % 2) * CHUNKS * MASS_BINS + chunk * MASS_BINS + tl.arange(0, MASS_BINS)[None, :]
    return tl.load(at, mask=chunk < CHUNKS, other=0)


@triton.jit
def _mass_state(bins, states, excess, top_p, row, turn):  # type: ignore[no-untyped-def]
    """(prefix, digit, rest): what round turn - 1 has found: leading digits of the last key kept, the digit after them,
    and the weight that the keys which begin so are to reach."""
    if turn == 1:
        prefix, wanted = excess * 0, _reach(tl.sum(bins, 0) - excess, top_p)
    else:
        prefix = tl.load(states + (row * MASS_ROUNDS + turn - 1) * 2)
        wanted = tl.load(states + (row * MASS_ROUNDS + turn - 1) * 2 + 1)
    digit, rest = _digit_reaching(bins, wanted, MASS_BINS)
    return prefix, digit, rest


@triton.jit(do_not_specialize=_VARYING)
def _mass_kernel(  # type: ignore[no-untyped-def]
    logits,
    best,
    temperature,
    min_p,
    top_k,
    top_p,
    counts,
    count_states,
    limits,  # int64 [D, 2]: `_cut`, written by the first round
    masses,  # int64 [D, 2, CHUNKS, MASS_BINS]: of this round and of the one before
    above,  # int64 [D, CHUNKS]: weight of the keys above the prefix
    states,  # int64 [D, MASS_ROUNDS, 2]: prefix and rest that each round begins with
    has_min_p,
    turn,
    stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < WIDTH
    values = tl.load(logits + row * stride + ids, mask=inside, other=0.0)
    its_best, its_temperature = tl.load(best + row), tl.load(temperature + row)
    least = tl.load(min_p + row, mask=has_min_p != 0, other=0.0)
    bin_index = tl.arange(0, MASS_BINS)
    if FIRST:
        k = tl.load(top_k + row)
        limit, excess = _cut(counts, count_states, row, k, its_best, its_temperature, least, UNIT)
        prefix = k * 0
        if chunk == 0:
            tl.store(limits + row * 2, limit)
            tl.store(limits + row * 2 + 1, excess)
    else:
        limit, excess = tl.load(limits + row * 2), tl.load(limits + row * 2 + 1)
        bins = tl.sum(_chunk_bins(masses, row, turn - 1, CHUNKS, PADDED), 0)
        prefix, digit, rest = _mass_state(bins, states, excess, tl.load(top_p + row), row, turn)
        prefix = prefix * MASS_BINS + digit
        if chunk == 0:
            tl.store(states + (row * MASS_ROUNDS + turn) * 2, prefix)
            tl.store(states + (row * MASS_ROUNDS + turn) * 2 + 1, rest)
        own = tl.load(masses + ((row * 2 + (turn - 1) % 2) * CHUNKS + chunk) * MASS_BINS + bin_index)
        higher = tl.load(above + row * CHUNKS + chunk, mask=turn > 1, other=0)
        tl.store(above + row * CHUNKS + chunk, higher + tl.sum(tl.where(bin_index > digit, own, 0), 0))
    key = order_key(values)
    shift = ((turn * -1 + (MASS_ROUNDS - 1)) * MASS_BITS).to(tl.uint32)
    inside &= (key >= limit.to(tl.uint32)) & (((key >> shift) >> MASS_BITS) == prefix.to(tl.uint32))
    found = tl.zeros([MASS_BINS], tl.int64)
    # Soon most chunks have nothing near the cut.
    if tl.max(inside.to(tl.int32), 0) > 0:
        weights = _weights(values, its_best, its_temperature, least, UNIT)
        digits = tl.where(inside, (key >> shift) & (MASS_BINS - 1), MASS_BINS)
        for i in tl.static_range(MASS_BINS):
            found = tl.where(bin_index == i, tl.sum(tl.where(digits == i, weights, 0), 0), found)
    tl.store(masses + ((row * 2 + turn % 2) * CHUNKS + chunk) * MASS_BINS + bin_index, found)


@triton.jit(do_not_specialize=_VARYING)
def _sum_kernel(  # type: ignore[no-untyped-def]
    logits,
    best,
    temperature,
    min_p,
    above,
    has_min_p,
    stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64) // CHUNKS
    ids = (tl.program_id(0) % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + ids, mask=ids < WIDTH, other=float("-inf"))
    least = tl.load(min_p + row, mask=has_min_p != 0, other=0.0)
    weights = _weights(values, tl.load(best + row), tl.load(temperature + row), least, UNIT)
    tl.store(above + tl.program_id(0).to(tl.int64), tl.sum(weights, 0))


@triton.jit(do_not_specialize=_VARYING)
def _pick_kernel(  # type: ignore[no-untyped-def]
    logits,
    best,
    temperature,
    min_p,
    top_p,
    seeds,
    positions,
    limits,
    masses,
    above,
    states,
    out,
    has_min_p,
    stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    UNIT: tl.constexpr,
    ORDERED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    its_best, its_temperature = tl.load(best + row), tl.load(temperature + row)
    least = tl.load(min_p + row, mask=has_min_p != 0, other=0.0)
    chunks = tl.arange(0, PADDED)
    mass = tl.load(above + row * CHUNKS + chunks, mask=chunks < CHUNKS, other=0)
    if ORDERED:
        each = _chunk_bins(masses, row, MASS_ROUNDS - 1, CHUNKS, PADDED)
        excess = tl.load(limits + row * 2 + 1)
        bins = tl.sum(each, 0)
        prefix, digit, rest = _mass_state(bins, states, excess, tl.load(top_p + row), row, MASS_ROUNDS)
        last = (prefix * MASS_BINS + digit).to(tl.uint32)
        weight = tl.maximum(_weights(value_of(last), its_best, its_temperature, least, UNIT), 1)
        keep = (rest + weight - 1) // weight  # of the tokens that equal the last key kept
        bin_index = tl.arange(0, MASS_BINS)[None, :]
        ties = tl.sum(tl.where(bin_index == digit, each, 0), 1) // weight
        before = tl.cumsum(ties, 0) - ties
        mass += tl.sum(tl.where(bin_index > digit, each, 0), 1)
        mass += weight * tl.minimum(tl.maximum(keep - before, 0), ties)
    cumulative = tl.cumsum(mass, 0)
    total = tl.sum(mass, 0)
    noise = _uniform(tl.load(seeds + row), tl.load(positions + row))
    target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    chunk = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), CHUNKS - 1)
    target -= tl.sum(tl.where(chunks == chunk, cumulative - mass, 0), 0)

    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < WIDTH
    values = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf"))
    weights = tl.where(inside, _weights(values, its_best, its_temperature, least, UNIT), 0)
    if ORDERED:
        key = order_key(values)
        tie = inside & (key == last)
        place = tl.sum(tl.where(chunks == chunk, before, 0), 0) + tl.cumsum(tie.to(tl.int32), 0)
        weights = tl.where((key > last) | (tie & (place <= keep)), weights, 0)
    found = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    tl.store(out + row, tl.minimum(chunk * CHUNK + found, WIDTH - 1).to(tl.int64))


def _unit(width: int) -> float:
    """The best token's weight: as large as sums over a vocabulary of `width` allow in 62 bits, and no more than 2**44."""
    return 2.0 ** min(44, 62 - (width - 1).bit_length())


def draw(
    logits: Tensor,
    best: Tensor,
    temperature: Tensor,
    min_p: Tensor | None,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    ordered: bool,
    *,
    chunk: int | None = None,
) -> Tensor:
    """The op of that name. chunk: columns of a program, for tests."""
    rows = rows_of(logits, chunk)
    out = torch.empty(rows.count, dtype=torch.int64, device=logits.device)
    if not rows.count:
        return out
    has_min_p = int(min_p is not None)
    common = (rows.logits, best, temperature, temperature if min_p is None else min_p)
    shape, stride = {**rows.shape(), "UNIT": _unit(rows.width)}, rows.logits.stride(0)
    padded = next_power_of_two(rows.chunks)
    above = _scratch(rows, rows.chunks)
    if ordered:
        limits, masses, states = _find_cuts(rows, common, top_k, top_p, above, has_min_p, shape, padded)
    else:
        limits = masses = states = above  # not read
        _sum_kernel[rows.by_chunk](*common, above, has_min_p, stride, **shape)
    _pick_kernel[(rows.count,)](
        *common,
        top_p,
        seeds,
        positions,
        limits,
        masses,
        above,
        states,
        out,
        has_min_p,
        stride,
        PADDED=padded,
        ORDERED=ordered,
        **shape,
    )
    return out


def _find_cuts(
    rows: Rows,
    common: tuple[Tensor, ...],
    top_k: Tensor,
    top_p: Tensor,
    above: Tensor,
    has_min_p: int,
    shape: dict[str, Any],
    padded: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the rounds; (limits, masses, states) for `_pick_kernel`."""
    stride = rows.logits.stride(0)
    size = (rows.count, COUNT_ROUNDS.value, COUNT_BINS.value)
    counts = torch.zeros(size, dtype=torch.int32, device=rows.logits.device)
    count_states = _scratch(rows, COUNT_ROUNDS.value, 2)
    for turn in range(COUNT_ROUNDS.value):
        _count_kernel[rows.by_chunk](*common, top_k, counts, count_states, has_min_p, turn, stride, **shape)
    limits, states = _scratch(rows, 2), _scratch(rows, MASS_ROUNDS.value, 2)
    masses = _scratch(rows, 2, rows.chunks, MASS_BINS.value)
    kept = (counts, count_states, limits, masses, above, states)
    for turn in range(MASS_ROUNDS.value):
        _mass_kernel[rows.by_chunk](
            *common, top_k, top_p, *kept, has_min_p, turn, stride, PADDED=padded, FIRST=turn == 0, **shape
        )
    return limits, masses, states


def _scratch(rows: Rows, *shape: int) -> Tensor:
    return torch.empty((rows.count, *shape), dtype=torch.int64, device=rows.logits.device)
