"""The ops `rms_norm` and `add_rms_norm`.

A program takes one wide row, or several narrow ones (head norms). How a row is summed depends on its width alone, so
its result has the same bits whatever the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, next_power_of_two, pdl_options, warps_for

PER_THREAD = 16  # elements of a row that a thread takes: two loads of 16 bytes of each input in bfloat16
TILE = 1024  # narrow rows are gathered up to so many elements a program


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    num_rows,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)[None, :]
    factor = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (columns < WIDTH) & (rows < num_rows)
    values = tl.load(x + rows * x_stride + columns, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1, keep_dims=True) / WIDTH
    normed = (wide * tl.math.rsqrt(mean + eps)).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + rows * WIDTH + columns, (normed * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    out,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)[None, :]
    factor = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = (columns < WIDTH) & (rows < num_rows)
    held = residual + rows * residual_stride + columns
    added = tl.load(x + rows * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    total = (tl.load(held, mask=inside, other=0.0).to(tl.float32) + added).to(residual.dtype.element_ty)
    tl.store(held, total, mask=inside)
    wide = total.to(tl.float32)  # the norm is that of the rounded sum
    mean = tl.sum(wide * wide, axis=1, keep_dims=True) / WIDTH
    normed = (wide * tl.math.rsqrt(mean + eps)).to(residual.dtype.element_ty).to(tl.float32)
    tl.store(out + rows * WIDTH + columns, (normed * factor).to(out.dtype.element_ty), mask=inside)


def launch_shape(width: int) -> dict[str, int]:
    """Of a launch over rows of `width` elements."""
    block = next_power_of_two(width)
    rows = max(TILE // block, 1)
    return {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": warps_for(block * rows, PER_THREAD)}


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool) -> Tensor:
    """The op of that name. x: [T, D], also with strided rows."""
    rows = _as_rows(x)
    num_rows, width = rows.shape
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    shape = launch_shape(width)
    _rms_norm_kernel[(ceil_div(num_rows, shape["ROWS"]),)](
        rows, weight, out, num_rows, rows.stride(0), eps, **shape, **pdl_options(pdl)
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool) -> Tensor:
    """The op of that name. x, residual: [T, D], also with strided rows."""
    rows = _as_rows(x)
    num_rows, width = rows.shape
    held = residual.view(num_rows, width)
    if held.stride(1) != 1:
        raise ValueError(f"the residual has a stride of {held.stride(1)} along a row; give one with contiguous rows")
    out = torch.empty(x.shape, dtype=torch.promote_types(residual.dtype, weight.dtype), device=x.device)
    shape = launch_shape(width)
    _add_rms_norm_kernel[(ceil_div(num_rows, shape["ROWS"]),)](
        rows, held, weight, out, num_rows, rows.stride(0), held.stride(0), eps, **shape, **pdl_options(pdl)
    )
    return out


def _as_rows(x: Tensor) -> Tensor:
    """x as a matrix with contiguous rows; a copy where it has none."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
