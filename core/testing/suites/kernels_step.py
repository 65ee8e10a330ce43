"""The checks of `rope_write_kv` and `step_inputs` in `KernelsSuite`: what goes into the cache, and where tokens stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]

# heads, KV heads, head size, value size, rotated dimensions
CACHE_SHAPES = ((9, 3, 64, 64, 64), (2, 2, 24, 40, 10), (4, 1, 80, 80, 80), (3, 1, 6, 2, 2))
BLOCKS, BLOCK_SIZE = 7, 4
POSITIONS = 300


def angles(positions: int, rotated: int) -> Tensor:
    """cos_sin as the rope ops get it, on the CPU."""
    frequencies = 10000.0 ** (-torch.arange(0, rotated, 2).double() / rotated)
    phase = torch.arange(positions).double()[:, None] * frequencies
    return torch.cat((phase.cos(), phase.sin()), dim=1).float()


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """The rotation of x [T, heads, D] in float64, on the CPU."""
    x, half = x.cpu().double(), cos_sin.shape[1] // 2
    cosine, sine = cos_sin.cpu()[positions.cpu()].double()[:, None].chunk(2, -1)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine, rest), -1)


@dataclass(frozen=True, slots=True)
class CacheCase:
    """One call of rope_write_kv: views of a fused projection, a cache in one of two layouts, slots of which one is -1."""

    projection: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    cos_sin: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor

    def call(self, kernel: Kernel, rotated: bool = True) -> Any:
        table = self.cos_sin if rotated else None
        return kernel(self.q, self.k, self.v, self.positions, table, self.keys, self.values, self.slots)


def cache_case(
    shape: tuple[int, int, int, int, int],
    tokens: int,
    device: str,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    heads_first: bool = False,
) -> CacheCase:
    """heads_first: the cache lies as [block, head, token, dim] in memory. Numbers are multiples of 1/8 below 2: every dtype
    of a cache holds them."""
    heads, kv_heads, size, value_size, rotated = shape
    generator = torch.Generator().manual_seed(tokens + size)

    def numbers(*dimensions: int) -> Tensor:
        return torch.randint(-15, 16, dimensions, generator=generator).float() / 8

    sizes = (heads * size, kv_heads * size, kv_heads * value_size)
    projection = numbers(tokens, sum(sizes)).to(dtype).to(device)
    parts = zip(projection.split_with_sizes(sizes, 1), (heads, kv_heads, kv_heads), strict=True)
    q, k, v = (part.view(tokens, count, -1) for part, count in parts)
    caches = []
    for width in (size, value_size):
        dimensions = (kv_heads, BLOCK_SIZE) if heads_first else (BLOCK_SIZE, kv_heads)
        cache = numbers(BLOCKS, *dimensions, width).to(cache_dtype or dtype).to(device)
        caches.append(cache.transpose(1, 2) if heads_first else cache)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:tokens]
    slots[tokens // 2] = -1
    positions = torch.randint(0, POSITIONS, (tokens,), generator=generator)
    table = angles(POSITIONS, rotated).to(device)
    return CacheCase(projection, q, k, v, positions.to(device), table, caches[0], caches[1], slots.to(device))


def check_cache_write(kernel: Kernel, case: CacheCase, roundoff: float, rotated: bool, where: str) -> None:
    """Queries are rotated in place, k and v stand at their slots, and nothing else in projection and cache has changed.
    roundoff: that of one rounding to the coarsest dtype on the way."""
    before = (case.projection, case.keys, case.values, case.q, case.k, case.v)
    fused, keys, values, q, k, v = (tensor.clone().cpu() for tensor in before)
    assert case.call(kernel, rotated) is None, "it works in place and returns nothing"
    wanted_q, wanted_k = q.double(), k.double()
    if rotated:
        wanted_q, wanted_k = (rotate(x, case.positions, case.cos_sin) for x in (q, k))
    _close(case.q, wanted_q, roundoff if rotated else 0.0, f"{where}: q")
    if not torch.equal(case.k.cpu(), k):
        _close(case.k, wanted_k, roundoff, f"{where}: k, which may be left or rotated, is neither")
    width = q.shape[1] * q.shape[2] + k.shape[1] * k.shape[2]
    assert torch.equal(case.projection.cpu()[:, width:], fused[:, width:]), f"{where}: it changed v"
    expected_keys, expected_values = keys.double(), values.double()
    untouched = torch.ones(BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    for token, slot in enumerate(case.slots.tolist()):
        if slot >= 0:
            at = divmod(slot, BLOCK_SIZE)
            expected_keys[at], expected_values[at] = wanted_k[token], v[token].double()
            untouched[at] = False
    _close(case.keys, expected_keys, roundoff if rotated else 0.0, f"{where}: keys in the cache")
    _close(case.values, expected_values, 0.0, f"{where}: values in the cache")
    same = case.keys.cpu()[untouched].float(), keys[untouched].float()
    assert torch.equal(*same), f"{where}: it wrote where no slot points to"


def _close(found: Tensor, wanted: Tensor, roundoff: float, where: str) -> None:
    error = (found.cpu().double() - wanted).abs()
    limit = 1.01 * roundoff * wanted.abs() + (4e-6 if roundoff else 0.0)
    assert (error <= limit).all(), f"{where}: wrong by up to {float(error.max())}"


# Step inputs


@dataclass(frozen=True, slots=True)
class StepCase:
    """counts: new tokens of each row. slots: of each row. computed: num_computed_tokens of every slot. padding: tokens
    beyond those of the rows. widths: columns of each group's block tables."""

    counts: tuple[int, ...]
    slots: tuple[int, ...]
    computed: tuple[int, ...]
    padding: int = 0
    widths: tuple[int, ...] = (12,)
    block_size: int = 16


STEP_CASES = {
    "decode": StepCase((1, 1, 1), (2, 0, 3), (7, 99, 16, 31)),
    "one row": StepCase((1,), (1,), (0, 15)),
    "prefill": StepCase((40,), (0,), (0, 5)),
    "a chunk": StepCase((33, 1), (1, 0), (3, 17)),
    "mixed": StepCase((5, 1, 17, 1), (3, 1, 0, 2), (0, 63, 64, 30)),
    "padding rows": StepCase((1, 1, 0, 0, 0), (1, 2, 4, 4, 4), (9, 16, 47, 5, 0), padding=3),
    "padding tokens": StepCase((4, 2), (0, 1), (1, 8), padding=6),
    "nothing but padding": StepCase((0, 0), (0, 0), (0, 6), padding=2),
    "two groups": StepCase((3, 1), (1, 2), (4, 30, 16), padding=1, widths=(12, 5)),
    "blocks of one token": StepCase((3, 1), (0, 1), (2, 6), widths=(16,), block_size=1),
    "a long row": StepCase((1, 1300, 1), (0, 2, 1), (40, 3, 77), widths=(170,)),
    "a wide table": StepCase((1, 2), (0, 1), (5, 9), widths=(1100,)),
}


def check_step_inputs(kernel: Kernel, case: StepCase, device: str, where: str) -> None:
    """Two steps one after the other, the outputs filled with nonsense before each."""
    generator = torch.Generator().manual_seed(len(case.counts))
    num_slots, stride = len(case.computed), max(case.computed) + 2 * max(case.counts) + 3
    token_ids = torch.randint(0, 50_000, (num_slots, stride), generator=generator, dtype=torch.int32)
    tables = [
        torch.randint(0, 1 << 20, (num_slots, width + 3), generator=generator, dtype=torch.int32)
        for width in case.widths
    ]
    computed = torch.tensor(case.computed)
    starts = torch.tensor([0, *case.counts]).cumsum(0).to(torch.int32)
    tokens = int(starts[-1]) + case.padding
    given = (torch.tensor(case.slots, dtype=torch.int32), starts, computed, token_ids)
    shown, shown_tables = ([x.clone().to(device) for x in given], tuple(x.clone().to(device) for x in tables))
    for step in range(2):
        ids, positions = (torch.full((tokens,), 77, device=device) for _ in range(2))
        lengths = torch.full((len(case.counts),), 77, dtype=torch.int32, device=device)
        mappings = tuple(torch.full((tokens,), 77, device=device) for _ in tables)
        rows = tuple(
            torch.full((len(case.counts), width), 77, dtype=torch.int32, device=device) for width in case.widths
        )
        outcome = kernel(*shown, shown_tables, case.block_size, ids, positions, lengths, mappings, rows)
        assert outcome is None, "it fills what it is given and returns nothing"
        at = f"{where}, step {step}"
        _check_tokens(case, computed, starts, token_ids, ids, positions, at)
        _check_groups(case, computed, tables, mappings, rows, at)
        for row, (slot, count) in enumerate(zip(case.slots, case.counts, strict=True)):
            computed[slot] += count
            assert int(lengths[row]) == int(computed[slot]), f"{at}, row {row}: seq_lens"
        assert shown[2].tolist() == computed.tolist(), f"{at}: num_computed"
    for name, now, before in zip(("starts", "token_ids"), (shown[1], shown[3]), (starts, token_ids), strict=True):
        assert torch.equal(now.cpu(), before), f"{where}: it changed {name}"
    assert all(torch.equal(now.cpu(), before) for now, before in zip(shown_tables, tables, strict=True)), where


def _check_tokens(
    case: StepCase, computed: Tensor, starts: Tensor, token_ids: Tensor, ids: Tensor, positions: Tensor, where: str
) -> None:
    wanted_ids, wanted_positions = [], []
    for slot, count in zip(case.slots, case.counts, strict=True):
        here = list(range(int(computed[slot]), int(computed[slot]) + count))
        wanted_positions += here
        wanted_ids += token_ids[slot, here].tolist()
    assert positions.tolist() == wanted_positions + [0] * case.padding, f"{where}: positions"
    assert ids.tolist() == wanted_ids + [0] * case.padding, f"{where}: input_ids"


def _check_groups(
    case: StepCase,
    computed: Tensor,
    tables: list[Tensor],
    mappings: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    where: str,
) -> None:
    for group, (table, mapping, found, width) in enumerate(zip(tables, mappings, rows, case.widths, strict=True)):
        wanted = []
        for slot, count in zip(case.slots, case.counts, strict=True):
            for position in range(int(computed[slot]), int(computed[slot]) + count):
                block = int(table[slot, position // case.block_size])
                wanted.append(block * case.block_size + position % case.block_size)
        assert mapping.tolist() == wanted + [-1] * case.padding, f"{where}, group {group}: slot mapping"
        assert torch.equal(found.cpu(), table[list(case.slots), :width]), f"{where}, group {group}: block tables"
