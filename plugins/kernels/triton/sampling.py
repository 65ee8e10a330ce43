"""The sampling ops in Triton. None waits for the device: shapes follow from those of the arguments."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .sampling_argmax import argmax
from .sampling_draw import draw
from .sampling_logprobs import gather_logprobs
from .sampling_rows import begin, rows_of

__all__ = ["argmax", "draw", "gather_logprobs", "penalize"]


@triton.jit(do_not_specialize=["local", "rows"])
def _penalize_kernel(  # type: ignore[no-untyped-def]
    logits,
    local,
    rows,
    divisors,
    amounts,
    stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    program = tl.program_id(0).to(tl.int64)
    ids = (program % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
    inside = ids < WIDTH
    held = logits + tl.load(local + program // CHUNKS) * stride + ids
    kept = tl.load(rows + program // CHUNKS) * WIDTH + ids
    values = tl.load(held, mask=inside, other=0.0)
    factors = tl.load(divisors + kept, mask=inside, other=1.0)
    values = tl.where(values > 0, tl.div_rn(values, factors), values * factors)
    tl.store(held, values - tl.load(amounts + kept, mask=inside, other=0.0), mask=inside)


def penalize(
    logits: Tensor, local: Tensor, rows: Tensor, divisors: Tensor, amounts: Tensor, *, chunk: int | None = None
) -> None:
    """The op of that name. Raises ValueError when a tensor's rows are not contiguous. chunk: columns of a program, for
    tests."""
    if logits.stride(1) != 1 or not divisors.is_contiguous() or not amounts.is_contiguous():
        raise ValueError("penalize works in place: rows of logits, and the pool's tensors, must be contiguous")
    if not len(local):
        return
    cut = rows_of(logits, chunk)
    # Without contraction a product is rounded before the subtraction, as the reference does.
    _penalize_kernel[(len(local) * cut.chunks,)](
        logits, local, rows, divisors, amounts, logits.stride(0), enable_fp_fusion=False, **cut.shape()
    )
