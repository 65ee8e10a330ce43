"""A product of many rows with its gated activation in the epilogue: gate and up never go to memory.

One tile of the product holds the same columns of gate and of up, side by side, so that the activation finds both in a
thread's registers. Operands come through tensor maps (TMA), programs stay on their multiprocessor and take tile after tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .activation import gate_of
from .launch import ceil_div, interpreting, num_sms
from .linear_shapes import Gated

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["tokens", "band"])
def gated_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    tokens,
    band,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GELU: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """x: descriptor of [tokens, K]. weight: of [2, WIDTH, K], gate before up. out: of [tokens, WIDTH].

    band: tiles of rows that are walked together, so that what they read stays in the level 2 cache. WIDE: the operands are
    widened first, for Triton's interpreter, whose products of bfloat16 are wrong. What lies outside a descriptor is read as
    zero and not written.
    """
    columns: tl.constexpr = (WIDTH + BLOCK_I - 1) // BLOCK_I
    rows = tl.cdiv(tokens, BLOCK_T)
    tile = tl.program_id(0)
    while tile < rows * columns:  # not a `for`: the interpreter cannot begin one at a program's number
        first = tile // (band * columns) * band
        height = tl.minimum(rows - first, band)
        row = (first + tile % (band * columns) % height) * BLOCK_T
        column = tile % (band * columns) // height * BLOCK_I
        sums = tl.zeros((BLOCK_T, 2 * BLOCK_I), tl.float32)
        for k in range(0, K, BLOCK_K):
            left = x.load([row, k])
            right = weight.load([0, column, k]).reshape(2 * BLOCK_I, BLOCK_K)
            if WIDE:
                left, right = left.to(tl.float32), right.to(tl.float32)
            sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
        gate, up = tl.split(sums.reshape(BLOCK_T, 2, BLOCK_I).permute(0, 2, 1))
        # Rounded as if they had gone through memory, so that the op of two steps has the same definition.
        gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
        out.store([row, column], (gate_of(gate, GELU) * up).to(DTYPE))
        tile += PROGRAMS


def gated_product(x: Tensor, weight: Tensor, shape: Gated, *, gelu: bool) -> Tensor:
    """x [T, K], weight [2 I, K] contiguous -> [T, I]: silu (or gelu) of the first half of the product, times the second.

    T is at least 1. Rows of x, of the weight and of the result must begin at multiples of 16 bytes.
    """
    tokens, k = x.shape
    width = weight.shape[0] // 2
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    tiles = ceil_div(tokens, shape.block_t) * ceil_div(width, shape.block_i)
    gated_kernel[(min(num_sms(x.device), tiles),)](
        TensorDescriptor.from_tensor(x, [shape.block_t, shape.block_k]),
        TensorDescriptor.from_tensor(weight.view(2, width, k), [2, shape.block_i, shape.block_k]),
        TensorDescriptor.from_tensor(out, [shape.block_t, shape.block_i]),
        tokens,
        shape.band,
        WIDTH=width,
        K=k,
        BLOCK_T=shape.block_t,
        BLOCK_I=shape.block_i,
        BLOCK_K=shape.block_k,
        PROGRAMS=num_sms(x.device),
        GELU=gelu,
        DTYPE=_DTYPES[x.dtype],
        WIDE=interpreting(),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out
