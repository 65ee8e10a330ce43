"""Calls of each op on rows of a fixed pool, for the check in `KernelsSuite` that a row does not depend on its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernels_sampling import filtered
from .kernels_step import POSITIONS, angles

POOL = 6  # rows
WIDTH = 130
EPS = 1e-5
OPS = (
    *("linear", "rms_norm", "add_rms_norm", "rope", "rope_write_kv", "silu_mul", "gelu_tanh_mul"),
    *("argmax", "penalize", "draw", "gather_logprobs"),
)


def call(op: str, kernel: Any, ids: list[int], device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The results for these rows of the pool, one of them a row of each tensor; ids may repeat."""

    def pool(seed: int, *shape: int) -> Tensor:
        whole = torch.randn(POOL, *shape, generator=torch.Generator().manual_seed(seed))
        return whole[ids].to(dtype).to(device)

    if op in _SAMPLING:
        return _SAMPLING[op](kernel, ids, device)
    if op.startswith("rope"):
        return _rope(op, kernel, ids, pool(1, 6, 24), device)
    x = pool(1, WIDTH)
    weight = torch.randn(WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    if op == "linear":
        matrix = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
        return (kernel.apply(x, kernel.pack(matrix), None),)
    if op == "rms_norm":
        return (kernel(x, weight, EPS),)
    if op == "add_rms_norm":
        residual = pool(4, WIDTH)
        return (kernel(x, residual, weight, EPS), residual)
    return (kernel(x),)


def _rope(op: str, kernel: Any, ids: list[int], heads: Tensor, device: str) -> tuple[Tensor, ...]:
    q, k, v = heads.split_with_sizes((3, 2, 1), 1)
    k = k[:, :1].contiguous()
    positions = torch.randint(0, POSITIONS, (POOL,), generator=torch.Generator().manual_seed(5))[ids].to(device)
    table = angles(POSITIONS, 16).to(device)
    if op == "rope":
        kernel(q, k, positions, table)
        return q, k
    keys, values = (torch.zeros(len(ids), 1, 1, 24, dtype=q.dtype, device=device) for _ in range(2))
    kernel(q, k, v, positions, table, keys, values, torch.arange(len(ids), device=device))
    return q, keys, values


def _argmax(kernel: Any, ids: list[int], device: str) -> tuple[Tensor, ...]:
    values, tokens = kernel(filtered(POOL, WIDTH, 6, "none").rows(ids).logits.to(device))
    return values, tokens


def _penalize(kernel: Any, ids: list[int], device: str) -> tuple[Tensor, ...]:
    logits = filtered(POOL, WIDTH, 6, "none").rows(ids).logits.to(device)
    factors = torch.rand(POOL, 2, WIDTH, generator=torch.Generator().manual_seed(7)).to(device) + 0.5
    divisors, amounts = (factors[:, at].contiguous() for at in range(2))
    kernel(logits, torch.arange(len(ids), device=device), torch.tensor(ids, device=device), divisors, amounts)
    return (logits,)


def _draw(kernel: Any, ids: list[int], device: str) -> tuple[Tensor, ...]:
    return tuple(
        filtered(POOL, WIDTH, seed, "all" if ordered else "min_p").rows(ids).call(kernel, device, ordered)
        for seed in range(2)
        for ordered in (False, True)
    )


def _gather(kernel: Any, ids: list[int], device: str) -> tuple[Tensor, ...]:
    logits = filtered(POOL, WIDTH, 6, "none").logits
    result: tuple[Tensor, ...] = kernel(logits[ids].to(device), torch.arange(POOL)[ids].to(device), 5)
    return result


_SAMPLING: dict[str, Callable[[Any, list[int], str], tuple[Tensor, ...]]] = {
    "argmax": _argmax,
    "penalize": _penalize,
    "draw": _draw,
    "gather_logprobs": _gather,
}
