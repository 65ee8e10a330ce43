"""Launch shapes by card, head size and data type: a table, so that nothing is tried out at start.

The shapes for Hopper were chosen on an H200 with benchmarks/gpu/attention.py --sweep; those of other cards are careful
guesses that fit their shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KIB = 1024
# Shared memory that one program may take, by family.
SHARED_MEMORY = {
    "hopper": 227 * KIB,  # 9.0, 10.x
    "ampere": 163 * KIB,  # 8.0
    "consumer": 99 * KIB,  # 8.6, 8.9, 12.x
    "old": 64 * KIB,  # 7.x
    "rocm": 64 * KIB,
}
MIN_ROWS = 16  # the smallest matrix that the matrix units take
MAX_SPLITS = 32
PROGRAMS_A_MULTIPROCESSOR = 3  # decode programs that run at once, by their shared memory
MAX_DECODE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """rows: of the matrix of queries. block_n: keys a tile. stages: tiles on their way at once."""

    rows: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a shape depends on. dim_k, dim_v: padded head sizes. item, cache_item: bytes of an element of queries and of the
    cache."""

    family: str
    dim_k: int
    dim_v: int
    item: int
    cache_item: int

    @property
    def widest(self) -> int:
        return max(self.dim_k, self.dim_v)


def family_of(kind: str, capability: tuple[int, int]) -> str:
    """The row of SHARED_MEMORY for a device."""
    if kind == "rocm":
        return "rocm"
    major, minor = capability
    if major in (9, 10):
        return "hopper"
    if major < 8:
        return "old"
    return "ampere" if (major, minor) == (8, 0) else "consumer"


def padded(size: int) -> int:
    """The power of two that a head size is padded to; 16 is the least that a matrix product takes."""
    return max(16, 1 << (size - 1).bit_length())


# Prefill by widest head size (up to): rows, keys a tile, warps, stages; for 2-byte elements.
_PREFILL: dict[str, dict[int, Shape]] = {
    "hopper": {64: Shape(128, 128, 8, 3), 128: Shape(128, 64, 8, 3), 256: Shape(128, 64, 8, 2)},
    "ampere": {64: Shape(128, 64, 4, 3), 128: Shape(128, 64, 8, 2), 256: Shape(64, 32, 4, 2)},
    "consumer": {64: Shape(128, 64, 4, 2), 128: Shape(64, 64, 4, 2), 256: Shape(64, 32, 4, 2)},
    "old": {64: Shape(64, 32, 4, 1), 128: Shape(64, 32, 4, 1), 256: Shape(32, 32, 4, 1)},
    "rocm": {64: Shape(128, 64, 4, 1), 128: Shape(128, 64, 4, 1), 256: Shape(64, 32, 4, 1)},
}
_DETERMINISTIC: dict[int, Shape] = {64: Shape(64, 64, 4, 2), 128: Shape(64, 64, 4, 2), 256: Shape(64, 32, 4, 2)}
# float32 has no matrix units that are exact: small tiles, whose operands stay in registers.
_PREFILL_FLOAT32: dict[int, Shape] = {64: Shape(32, 32, 4, 1), 128: Shape(32, 32, 4, 1), 256: Shape(16, 16, 4, 1)}

_DECODE: dict[int, Shape] = {64: Shape(16, 64, 2, 3), 128: Shape(16, 64, 4, 2), 256: Shape(16, 32, 2, 3)}
_DECODE_FLOAT32: dict[int, Shape] = {64: Shape(16, 32, 4, 2), 128: Shape(16, 32, 4, 2), 256: Shape(16, 16, 4, 2)}


def prefill_shape(sizes: Sizes, *, deterministic: bool = False) -> Shape:
    if sizes.item == 4:
        table = _PREFILL_FLOAT32
    elif deterministic:
        table = _DETERMINISTIC
    else:
        table = _PREFILL[sizes.family]
    return fitted(_row(table, sizes.widest), sizes)


def decode_shape(sizes: Sizes, rows: int) -> Shape:
    """rows: that one KV head's queries take, a power of two of at least MIN_ROWS."""
    shape = _row(_DECODE_FLOAT32 if sizes.item == 4 else _DECODE, sizes.widest)
    if sizes.family in ("old", "rocm"):
        shape = replace(shape, stages=min(shape.stages, 1 if sizes.family == "rocm" else 2))
    if rows > MIN_ROWS:
        shape = replace(shape, rows=rows, warps=4)
    return fitted(shape, sizes)


def _row(table: dict[int, Shape], size: int) -> Shape:
    return table[min(bound for bound in table if size <= bound)]


def shared_bytes(shape: Shape, sizes: Sizes) -> int:
    """Shared memory that a shape takes at most: the queries, and the tiles on their way."""
    tiles = shape.stages * shape.block_n * (sizes.dim_k + sizes.dim_v) * sizes.cache_item
    return shape.rows * sizes.dim_k * sizes.item + tiles


def fitted(shape: Shape, sizes: Sizes) -> Shape:
    """The shape, made smaller until it fits the card: fewer stages first, then fewer keys, then fewer rows."""
    while shared_bytes(shape, sizes) > SHARED_MEMORY[sizes.family]:
        if shape.stages > 1:
            shape = replace(shape, stages=shape.stages - 1)
        elif shape.block_n > 16:
            shape = replace(shape, block_n=shape.block_n // 2)
        elif shape.rows > MIN_ROWS:
            shape = replace(shape, rows=shape.rows // 2)
        else:
            break
    return shape


@dataclass(frozen=True, slots=True)
class Packing:
    """How rows are made of tokens and heads: `tokens` tokens with `heads` query heads each; a KV head's query heads are
    dealt out to `parts` programs."""

    heads: int
    tokens: int
    parts: int


def pack(group: int, rows: int) -> Packing:
    """The packing of `group` query heads of a KV head into `rows` rows that leaves the fewest of them empty; of equally
    good ones that which reads the keys least often."""
    best = Packing(1, rows, group)
    best_share = 0.0
    for parts in range(1, group + 1):
        heads = -(-group // parts)
        if heads > rows or heads * (parts - 1) >= group:
            continue
        tokens = rows // heads
        share = group * tokens / (parts * rows)
        if share > best_share * 1.1:
            best, best_share = Packing(heads, tokens, parts), share
    return best


def decode_packing(group: int) -> tuple[int, Packing]:
    """(rows, packing) of the decode kernel: one program takes all query heads of a KV head, up to 64."""
    parts = -(-group // 64)
    heads = -(-group // parts)
    rows = max(MIN_ROWS, 1 << (heads - 1).bit_length())
    return rows, Packing(heads, min(rows // heads, MAX_DECODE_TOKENS), parts)


def decode_tokens(packing: Packing) -> int:
    """New tokens up to which a request goes to the decode kernel: those of two programs, so that a draft's verification is
    decoded too. The same whatever the batch, as each kernel adds in its own order."""
    return min(MAX_DECODE_TOKENS, 2 * packing.tokens)


def split_plan(programs: int, multiprocessors: int, max_tiles: int) -> tuple[int, int]:
    """(splits, fewest tiles of a split) for `programs` rows times KV heads and contexts of up to max_tiles tiles.

    As many as can run at once: a second round of them costs more than it evens out. Independent of the contexts themselves,
    since a graph's launches are fixed.
    """
    return max(1, min(multiprocessors * PROGRAMS_A_MULTIPROCESSOR // programs, MAX_SPLITS, max_tiles)), 1
