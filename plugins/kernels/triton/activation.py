"""The ops `silu_mul` and `gelu_tanh_mul`: a program takes a piece of a row, so that one row too keeps the device busy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, next_power_of_two, pdl_options, warps_for

BLOCK = 1024  # columns of a program
PER_THREAD = 8  # one load of 16 bytes of gate and of up in bfloat16
GELU_LINEAR = tl.constexpr(2 * 0.7978845608028654)  # twice the root of 2 / pi
GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def gate_of(gate, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate), or gelu(gate) in its tanh form; gate: float32."""
    # (1 + tanh(z)) / 2 is sigmoid(2 z), without tanh's cancellation far below zero.
    inner = gate * (GELU_LINEAR + (GELU_LINEAR * GELU_CUBIC) * gate * gate) if GELU else gate
    # exp overflows to infinity where the sigmoid is zero, and x / infinity is the zero that is wanted.
    return gate / (1.0 + tl.exp(-inner))


@triton.jit
def _gated_kernel(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)  # one dimension: the others end at 65,535
    row = (program // PIECES).to(tl.int64)
    columns = (program % PIECES) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (gate_of(gate, GELU) * up).to(out.dtype.element_ty), mask=inside)


def _gated(gate_up: Tensor, gelu: bool, pdl: bool) -> Tensor:
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    width = rows.shape[1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(BLOCK, next_power_of_two(width))
    pieces = ceil_div(width, block)
    _gated_kernel[(rows.shape[0] * pieces,)](
        rows,
        out,
        rows.stride(0),
        WIDTH=width,
        BLOCK=block,
        PIECES=pieces,
        GELU=gelu,
        num_warps=warps_for(block, PER_THREAD),
        **pdl_options(pdl),
    )
    return out


def silu_mul(gate_up: Tensor, *, pdl: bool) -> Tensor:
    """The op of that name. gate_up: [T, 2 I], also with strided rows."""
    return _gated(gate_up, False, pdl)


def gelu_tanh_mul(gate_up: Tensor, *, pdl: bool) -> Tensor:
    """The op of that name. gate_up: [T, 2 I], also with strided rows."""
    return _gated(gate_up, True, pdl)
