"""Norms and gated activations on a CPU: float32 or bfloat16 in memory, float32 arithmetic."""

from __future__ import annotations

import functools

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
    sigmoid,
    through_bf16,
)
from hotswap.core.layers.jit.native import Native, compiled, dtype_name, threads_for

_ROWS_PER_ITEM = 4
_COLUMNS_PER_ITEM = 1024
_CHAINS = 4

_NORM_PARAMS = [
    ("x", "ptr"),
    ("weight", "ptr"),
    ("out", "ptr"),
    ("residual", "ptr"),
    ("rows", "i64"),
    ("h", "i64"),
    ("inner", "i64"),
    ("ldx", "i64"),
    ("ldo", "i64"),
    ("ldr", "i64"),
    ("eps", "f32"),
    ("offset", "f32"),
]
_GATE_PARAMS = [("x", "ptr"), ("out", "ptr"), ("rows", "i64"), ("columns", "i64"), ("ldx", "i64"), ("ldo", "i64")]


def _inverse_rms(team: Team, x: Buffer, residual: Buffer | None) -> Val:
    """1 / sqrt(mean square + eps) of a row; with `residual`, x is added to it first, in place.

    Four interleaved vector sums, then a scalar tail: the order depends on the row's length only.
    """
    fn, h = team.fn, team.arg["h"]
    width = fn.target.width
    source = x if residual is None else residual

    def value(index: Val, lanes: int) -> Val:
        if residual is not None:
            residual.store(x.load(index, lanes) + residual.load(index, lanes), index)
        return source.load(index, lanes)  # as stored: a bf16 residual is normalised after its rounding

    sums = [fn.zeros(width) for _ in range(_CHAINS)]
    tail = fn.zeros(1)
    wide = h - h % (width * _CHAINS)
    with fn.loop(0, wide, width * _CHAINS) as index:
        for chain, total in enumerate(sums):
            v = value(index + chain * width, width)
            total.set(fn.fma(v, v, total.get()))
    with fn.loop(wide, h) as index:
        v = value(index, 1)
        tail.set(fn.fma(v, v, tail.get()))
    squares = (sums[0].get() + sums[1].get()) + (sums[2].get() + sums[3].get())
    mean = (fn.sum_lanes(squares) + tail.get()) / h.to_f32()
    return 1.0 / fn.sqrt(mean + team.arg["eps"])


def _norm_function(module: Module, name: str, dtype: str, wdtype: str, *, add: bool, wide: bool) -> None:
    width = module.target.width
    with parallel_function(module, name, _NORM_PARAMS) as team:
        fn, arg = team.fn, team.arg
        weight = team.buffer("weight", wdtype)
        with team.items((arg["rows"] + (_ROWS_PER_ITEM - 1)) // _ROWS_PER_ITEM) as item:
            first = item * _ROWS_PER_ITEM
            with fn.loop(first, (first + _ROWS_PER_ITEM).minimum(arg["rows"])) as row:
                outer, shift = row // arg["inner"], (row % arg["inner"]) * arg["h"]
                x = team.buffer("x", dtype).at(outer * arg["ldx"] + shift)
                out = team.buffer("out", dtype).at(outer * arg["ldo"] + shift)
                residual = team.buffer("residual", dtype).at(outer * arg["ldr"] + shift) if add else None
                scale = _inverse_rms(team, x, residual)
                source = residual or x

                def emit(index: Val, lanes: int) -> None:
                    factor = weight.load(index, lanes) + arg["offset"].splat(lanes)
                    value = source.load(index, lanes) * scale.splat(lanes)
                    if dtype == "bf16" and not wide:
                        value = through_bf16(value)
                    out.store(value * factor, index)

                vectors = arg["h"] - arg["h"] % width
                with fn.loop(0, vectors, width) as index:
                    emit(index, width)
                with fn.loop(vectors, arg["h"]) as index:
                    emit(index, 1)


def build_norm(target: Target, dtype: str, wdtype: str, *, add: bool, wide: bool) -> Module:
    """The module of `rms_norm` or, with `add`, `add_rms_norm`: activations `dtype`, weights `wdtype`."""
    name = "add_rms_norm" if add else "rms_norm"
    module = Module(f"{name}_{dtype}_{wdtype}", target)
    _norm_function(module, name, dtype, wdtype, add=add, wide=wide)
    return module


def _silu(fn: Function, gate: Val) -> Val:
    return gate * sigmoid(gate)


def _gelu_tanh(fn: Function, gate: Val) -> Val:
    """0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), as x sigmoid(2 u), which does not cancel."""
    twice_root = 1.5957691216057308
    inner = fn.fma(gate * gate, fn.f32(twice_root * 0.044715, gate.lanes), fn.f32(twice_root, gate.lanes))
    return gate * sigmoid(gate * inner)


_ACTIVATIONS = {"silu_mul": _silu, "gelu_tanh_mul": _gelu_tanh}


def build_gate(target: Target, name: str, dtype: str) -> Module:
    """The module of `silu_mul` or `gelu_tanh_mul` on `dtype`."""
    module = Module(f"{name}_{dtype}", target)
    width = target.width
    with parallel_function(module, name, _GATE_PARAMS) as team:
        fn, arg = team.fn, team.arg
        columns = arg["columns"]
        pieces = (columns + (_COLUMNS_PER_ITEM - 1)) // _COLUMNS_PER_ITEM
        with team.items(arg["rows"] * pieces) as item:
            row, first = item // pieces, (item % pieces) * _COLUMNS_PER_ITEM
            gate = team.buffer("x", dtype).at(row * arg["ldx"])
            up = gate.at(columns)
            out = team.buffer("out", dtype).at(row * arg["ldo"])

            def emit(index: Val, lanes: int) -> None:
                out.store(_ACTIVATIONS[name](fn, gate.load(index, lanes)) * up.load(index, lanes), index)

            last = (first + _COLUMNS_PER_ITEM).minimum(columns)
            wide = last - (last - first) % width
            with fn.loop(first, wide, width) as index:
                emit(index, width)
            with fn.loop(wide, last) as index:
                emit(index, 1)
    return module


@functools.cache
def _norm(target: Target, dtype: str, wdtype: str, add: bool, wide: bool) -> Native:
    def build() -> Module:
        return build_norm(target, dtype, wdtype, add=add, wide=wide)

    return compiled(build, "add_rms_norm" if add else "rms_norm", _NORM_PARAMS)


@functools.cache
def _gate(target: Target, name: str, dtype: str) -> Native:
    return compiled(lambda: build_gate(target, name, dtype), name, _GATE_PARAMS)


def _rows(op: str, name: str, x: torch.Tensor) -> tuple[int, int]:
    """(rows per outer index, outer stride) of [T, H] or [T, heads, H] whose only gaps are between outer rows."""
    stride = x.stride()
    if stride[-1] == 1:
        if len(stride) == 2:
            return 1, stride[0]
        if len(stride) == 3 and (stride[1] == x.shape[2] or x.shape[1] == 1):
            return x.shape[1], stride[0]
    raise ValueError(
        f"{op}: {name} must be [T, H] or [T, heads, H], contiguous within a row, not {tuple(x.shape)} {x.stride()}"
    )


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    wide: bool = False,
    weight_offset: float = 0.0,
    threads: int | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension.

    x is [T, H], or [T, heads, H] for a norm of each head; rows may be strided. `out` has x's shape and dtype and may be
    x.
    In bfloat16 the normalised value is rounded before the weight multiplies, and the product again; with `wide` (gemma,
    olmo2) only the product is. `weight_offset` is 1.0 for gemma's weights. A row's bits do not depend on other rows.
    """
    inner, ldx = _rows("rms_norm", "x", x)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    elif out.shape != x.shape or out.dtype is not x.dtype:
        raise ValueError(f"rms_norm: out must be {tuple(x.shape)} {x.dtype}, not {tuple(out.shape)} {out.dtype}")
    _, ldo = _rows("rms_norm", "out", out)
    h = x.shape[-1]
    if weight.shape != (h,) or weight.stride(0) != 1:
        raise ValueError(f"rms_norm: weight must be [{h}] and contiguous, not {tuple(weight.shape)}")
    rows = x.shape[0] * inner
    function = _norm(host_target(), dtype_name("rms_norm", x), dtype_name("rms_norm", weight), False, wide)
    function(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        0,
        rows,
        h,
        inner,
        ldx,
        ldo,
        0,
        eps,
        weight_offset,
        threads_for(rows * h, threads),
    )
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    wide: bool = False,
    weight_offset: float = 0.0,
    threads: int | None = None,
) -> torch.Tensor:
    """residual += x, in place and rounded to its dtype; returns the rms_norm of the new residual.

    x, residual and out are [T, H] of one dtype, with strided rows allowed; `out` may be x. `wide`, `weight_offset`: see
    `rms_norm`.
    """
    if x.dim() != 2 or residual.shape != x.shape or residual.dtype is not x.dtype:
        raise ValueError(
            f"add_rms_norm: x {tuple(x.shape)} {x.dtype} and residual {tuple(residual.shape)} {residual.dtype} "
            "must be [T, H] of one dtype"
        )
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    elif out.shape != x.shape or out.dtype is not x.dtype:
        raise ValueError(f"add_rms_norm: out must be {tuple(x.shape)} {x.dtype}, not {tuple(out.shape)} {out.dtype}")
    rows, h = x.shape
    if weight.shape != (h,) or weight.stride(0) != 1:
        raise ValueError(f"add_rms_norm: weight must be [{h}] and contiguous, not {tuple(weight.shape)}")
    function = _norm(host_target(), dtype_name("add_rms_norm", x), dtype_name("add_rms_norm", weight), True, wide)
    function(
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        residual.data_ptr(),
        rows,
        h,
        1,
        _rows("add_rms_norm", "x", x)[1],
        _rows("add_rms_norm", "out", out)[1],
        _rows("add_rms_norm", "residual", residual)[1],
        eps,
        weight_offset,
        threads_for(rows * h, threads),
    )
    return out


def _gated(name: str, x: torch.Tensor, out: torch.Tensor | None, threads: int | None) -> torch.Tensor:
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        raise ValueError(
            f"{name}: gate_up must be [T, 2 I], contiguous within a row, not {tuple(x.shape)} {x.stride()}"
        )
    rows, columns = x.shape[0], x.shape[1] // 2
    if out is None:
        out = torch.empty((rows, columns), dtype=x.dtype)
    elif out.shape != (rows, columns) or out.dtype is not x.dtype or out.stride(1) != 1:
        raise ValueError(
            f"{name}: out must be [{rows}, {columns}] {x.dtype}, contiguous within a row, "
            f"not {tuple(out.shape)} {out.dtype} {out.stride()}"
        )
    function = _gate(host_target(), name, dtype_name(name, x))
    function(
        x.data_ptr(),
        out.data_ptr(),
        rows,
        columns,
        x.stride(0),
        out.stride(0),
        threads_for(rows * columns * 4, threads),
    )
    return out


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None, *, threads: int | None = None) -> torch.Tensor:
    """silu(gate) * up for gate_up [T, 2 I] = (gate | up), as [T, I]."""
    return _gated("silu_mul", gate_up, out, threads)


def gelu_tanh_mul(
    gate_up: torch.Tensor, out: torch.Tensor | None = None, *, threads: int | None = None
) -> torch.Tensor:
    """gelu(gate, tanh approximation) * up for gate_up [T, 2 I] = (gate | up), as [T, I]."""
    return _gated("gelu_tanh_mul", gate_up, out, threads)
