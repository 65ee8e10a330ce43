"""Linear layers on a CPU: weights packed into panels once, bf16 or f32 in memory, all arithmetic in float32.

A panel holds NR = 2 vectors of output columns: [K, NR], contiguous, so that every batch size reads the weights once and
in order. A tile keeps the sums of up to 6 (12 with 32 vector registers) rows by NR columns in registers over the whole
of K. Each output element is one chain of fused multiply-adds over ascending k, whatever the batch: the bits of a row do
not depend on the other rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from hotswap.core.layers.jit import (
    Buffer,
    Function,
    Module,
    Target,
    Team,
    Val,
    host_target,
    parallel_function,
    team_size,
)
from hotswap.core.layers.jit.native import DTYPES, Native, compiled, dtype_name, pieces, split_table

# Bytes of activations that a block of rows may fill: about half of a level 2 cache. But a block has so many rows at
# least: each block reads all weights once more.
_ROW_BLOCK_BYTES = 256 * 1024
_ROW_BLOCK = 48
# Below this many multiplications a second thread costs more than it brings.
_SERIAL_PRODUCTS = 64 * 1024
_ITEMS_PER_THREAD = 6

_PARAMS = [
    ("x", "ptr"),
    ("w", "ptr"),
    ("bias", "ptr"),
    ("out", "ptr"),
    ("m", "i64"),
    ("n", "i64"),
    ("k", "i64"),
    ("ldx", "i64"),
    ("ldo", "i64"),
    ("row_block", "i64"),
    ("panel_chunk", "i64"),
]
_TILE_PARAMS = [
    ("x", "ptr"),
    ("w", "ptr"),
    ("bias", "ptr"),
    ("out", "ptr"),
    ("k", "i64"),
    ("ldx", "i64"),
    ("ldo", "i64"),
]


def tile_panels(target: Target, rows: int) -> int:
    """How many panels a tile of few rows takes at once: enough independent sums to hide the latency of fma."""
    sums = 8 if target.registers < 32 else 16
    return max(1, min(4, sums // (2 * rows)))


@dataclass(frozen=True)
class PackedLinear:
    """The weight of one linear layer, [N, K], as panels [ceil(N / NR), K, NR] padded with zero columns.

    bf16 panels alternate the columns of the two vectors (0, W, 1, W + 1, ...): one load, a shift and a mask then give
    both vectors as float32 in column order.
    """

    panels: torch.Tensor
    n: int
    k: int

    @property
    def dtype(self) -> torch.dtype:
        return self.panels.dtype

    def unpack(self) -> torch.Tensor:
        """The weight [N, K], a new tensor, equal to what was packed."""
        panels, k, nr = self.panels.shape
        if self.dtype == torch.bfloat16:
            columns = self.panels.view(panels, k, nr // 2, 2).permute(0, 3, 2, 1)
        else:
            columns = self.panels.permute(0, 2, 1)
        return columns.reshape(panels * nr, k)[: self.n].contiguous()


def pack(weight: torch.Tensor, *, width: int | None = None) -> PackedLinear:
    """Packs a weight [N, K] (float32 or bfloat16, any strides); the original may be freed afterwards.

    `width` is the float32 lanes of a vector, that of the host unless a test says otherwise.
    Raises ValueError for other shapes and TypeError for other dtypes.
    """
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"pack needs a weight of shape [N, K], not {tuple(weight.shape)}")
    if weight.dtype not in DTYPES:
        raise TypeError(f"pack takes float32 or bfloat16 weights, not {weight.dtype}")
    width = width or host_target().width
    n, k = weight.shape
    nr = 2 * width
    panels = torch.empty((-(-n // nr), k, nr), dtype=weight.dtype)
    whole = n // nr
    if whole:
        _fill(panels[:whole], weight[: whole * nr], width)
    if whole * nr < n:
        last = torch.zeros((nr, k), dtype=weight.dtype)
        last[: n - whole * nr] = weight[whole * nr :]
        _fill(panels[whole:], last, width)
    return PackedLinear(panels, n, k)


def _fill(panels: torch.Tensor, rows: torch.Tensor, width: int) -> None:
    count, k, nr = panels.shape
    if panels.dtype == torch.bfloat16:
        panels.view(count, k, width, 2).copy_(rows.reshape(count, 2, width, k).permute(0, 3, 2, 1))
    else:
        panels.copy_(rows.reshape(count, nr, k).permute(0, 2, 1))


def _tile(module: Module, rows: int, panels: int, wdtype: str, odtype: str) -> Function:
    """A function for `rows` x (`panels` * NR) outputs; x, w, bias (or null), out: a tile's first elements."""
    fn = module.function(f"tile_{rows}x{panels}", _TILE_PARAMS)
    width = module.target.width
    nr = 2 * width
    k = fn.arg["k"]
    x = [fn.buffer("x", "f32").at(fn.arg["ldx"] * r) for r in range(rows)]
    w = [fn.buffer("w", wdtype).at(k * (nr * p)) for p in range(panels)]
    sums = [[(fn.zeros(width), fn.zeros(width)) for _ in range(panels)] for _ in range(rows)]

    # Not unrolled: measured, it gains nothing here and costs compile time.
    with fn.loop(0, k) as index:
        weights = [w[p].load_pair(index * nr, width) for p in range(panels)]
        for r in range(rows):
            factor = x[r].load(index).splat(width)
            for p in range(panels):
                for half in range(2):
                    total = sums[r][p][half]
                    total.set(fn.fma(factor, weights[p][half], total.get()))
    bias, out = fn.buffer("bias", "f32"), fn.buffer("out", odtype)
    with fn.when(bias.is_set()):
        for p in range(panels):
            for half in range(2):
                addend = bias.load(p * nr + half * width, width)
                for row in sums:
                    row[p][half].set(row[p][half].get() + addend)
    for r, row in enumerate(sums):
        for p in range(panels):
            for half in range(2):
                out.at(fn.arg["ldo"] * r).store(row[p][half].get(), p * nr + half * width)
    fn.finish()
    return fn


@dataclass
class _Driver:
    """Emits what a thread does with one item: a block of rows times a chunk of panels."""

    team: Team
    wdtype: str
    odtype: str
    tiles: dict[tuple[int, int], Function]

    def tile(self, function: Function, row: Val, panel: Val, bias: Buffer, out: Buffer, ldo: Val) -> None:
        fn, arg = self.team.fn, self.team.arg
        nr = 2 * fn.target.width
        x = self.team.buffer("x", "f32").at(row * arg["ldx"])
        w = self.team.buffer("w", self.wdtype).at(panel * arg["k"] * nr)
        fn.call(function, x.pointer, w.pointer, bias.pointer, out.pointer, arg["k"], arg["ldx"], ldo)

    def whole(self, function: Function, row: Val, panel: Val) -> None:
        """A tile all of whose columns exist."""
        arg = self.team.arg
        column = panel * (2 * self.team.fn.target.width)
        bias = self.team.buffer("bias", "f32")
        bias = self.team.fn.choose(bias.is_set(), bias.at(column), bias)
        out = self.team.buffer("out", self.odtype).at(row * arg["ldo"] + column)
        self.tile(function, row, panel, bias, out, arg["ldo"])

    def padded(self, function: Function, rows: int, row: Val, panel: Val) -> None:
        """A tile of the last panel, which has padding: computed aside, then copied as far as there are columns."""
        fn, arg = self.team.fn, self.team.arg
        nr = 2 * fn.target.width
        column = panel * nr
        columns = arg["n"] - column
        bias, aside = self.team.buffer("bias", "f32"), fn.stack_buffer("f32", nr)
        with fn.when(bias.is_set()), fn.loop(0, columns) as c:
            aside.store(bias.load(column + c), c)
        result = fn.stack_buffer(self.odtype, rows * nr)
        self.tile(function, row, panel, fn.choose(bias.is_set(), aside, bias), result, fn.i64(nr))
        out = self.team.buffer("out", self.odtype).at(column)
        with fn.loop(0, rows) as r, fn.loop(0, columns) as c:
            out.at((row + r) * arg["ldo"] + c).copy(result.at(r * nr + c))

    def item(self, row: Val, rows: Val, first: Val, last: Val) -> None:
        fn = self.team.fn
        begin = fn.var(first.type, first)
        whole = (self.team.arg["n"] // (2 * fn.target.width)).minimum(last)
        for (few, together), function in self.tiles.items():
            if together == 1:
                continue
            with fn.when(rows.eq(few)):
                stop = whole - (whole - begin.get()).maximum(0) % together
                with fn.loop(begin.get(), stop, together) as panel:
                    self.whole(function, row, panel)
                begin.set(stop.maximum(begin.get()))
        singles = {count: function for (count, together), function in self.tiles.items() if together == 1}
        split = split_table(list(singles))
        table = fn.module.table(fn, split)
        with fn.loop(begin.get(), last) as panel:
            done = fn.var(rows.type, 0)
            with fn.forever() as after:
                start = done.get()
                fn.break_if(start.ge(rows), after)
                size = table.load((rows - start).minimum(len(split) - 1))
                at = row + start
                with fn.when_else(panel.lt(whole)) as (inside, last_panel):
                    with inside:
                        fn.switch(size, {n: functools.partial(self.whole, f, at, panel) for n, f in singles.items()})
                    with last_panel:
                        fn.switch(
                            size, {n: functools.partial(self.padded, f, n, at, panel) for n, f in singles.items()}
                        )
                done.set(start + size)


def build(target: Target, wdtype: str, odtype: str) -> Module:
    """The module with `linear(_PARAMS..., threads)`: float32 activations, `wdtype` weights, `odtype` output."""
    module = Module(f"linear_{wdtype}_{odtype}", target)
    shapes = {(rows, together) for rows in pieces(target.registers) for together in (1, tile_panels(target, rows))}
    tiles = {shape: _tile(module, *shape, wdtype, odtype) for shape in sorted(shapes)}
    with parallel_function(module, "linear", _PARAMS) as team:
        arg = team.arg
        row_block, panel_chunk = arg["row_block"], arg["panel_chunk"]
        panels = (arg["n"] + (2 * target.width - 1)) // (2 * target.width)
        chunks = (panels + panel_chunk - 1) // panel_chunk
        driver = _Driver(team, wdtype, odtype, tiles)
        with team.items(chunks * ((arg["m"] + row_block - 1) // row_block)) as item:
            row = (item // chunks) * row_block
            first = (item % chunks) * panel_chunk
            last = (first + panel_chunk).minimum(panels)
            driver.item(row, (arg["m"] - row).minimum(row_block), first, last)
    return module


@functools.cache
def _native(target: Target, wdtype: str, odtype: str) -> Native:
    return compiled(lambda: build(target, wdtype, odtype), "linear", _PARAMS)


@functools.cache
def _blocking(m: int, n: int, k: int, threads: int, target: Target) -> tuple[int, int]:
    """(row_block, panel_chunk) for a shape. They decide who computes what and when, never the result."""
    most = pieces(target.registers)[-1]
    row_block = max(_ROW_BLOCK, _ROW_BLOCK_BYTES // (4 * k) // most * most)
    panels = -(-n // (2 * target.width))
    chunk = panels if threads <= 1 else max(4, -(-panels // (threads * _ITEMS_PER_THREAD)) // 4 * 4)
    return min(m, row_block), min(panels, chunk)


def linear(
    x: torch.Tensor,
    packed: PackedLinear,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    threads: int | None = None,
) -> torch.Tensor:
    """x [M, K] (float32 or bfloat16) times the packed weight, plus bias [N], as [M, N].

    Everything is summed in float32 and rounded once. The result has `out`'s dtype, else `out_dtype`, else that of x.
    Rows of x and out may be strided, their elements not. A float32 bias and float32 x are used as they are; others are
    converted by each call. `threads` is torch's setting unless given; it does not change a bit of the result.
    Raises ValueError when shapes or strides do not fit.
    """
    m, k = x.shape
    n = packed.n
    if k != packed.k:
        raise ValueError(f"linear: x has {k} columns, the weight {packed.k}")
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype or x.dtype)
    elif out.shape != (m, n) or out.stride(1) != 1:
        raise ValueError(f"linear: out must be [{m}, {n}] with contiguous rows, not {tuple(out.shape)} {out.stride()}")
    if m == 0:
        return out
    if x.dtype is not torch.float32:
        x = x.float()
    if x.stride(1) != 1:
        x = x.contiguous()
    if bias is not None:
        if bias.shape != (n,):
            raise ValueError(f"linear: bias must be [{n}], not {tuple(bias.shape)}")
        bias = bias.float().contiguous()
    target = host_target()
    threads = 1 if m * n * k < _SERIAL_PRODUCTS else team_size(threads)
    row_block, chunk = _blocking(m, n, k, threads, target)
    function = _native(target, DTYPES[packed.dtype], dtype_name("linear", out))
    function(
        x.data_ptr(),
        packed.panels.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        m,
        n,
        k,
        x.stride(0),
        out.stride(0),
        row_block,
        chunk,
        threads,
    )
    return out
