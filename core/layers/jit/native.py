"""What kernels share: dtype names, compiled functions, tiles of rows, and how many threads a call deserves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .builder import Module
from .compiler import CompiledModule, compile_module
from .pool import team_size

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}

Native = Callable[..., None]

# Below this many elements a second thread costs more than it brings.
_SERIAL_ELEMENTS = 16 * 1024


def compiled(build: Callable[[], Module], name: str, params: Sequence[tuple[str, str]]) -> Native:
    """Compiles the module that `build` makes and returns its parallel function `name`."""
    code = compile_module(build)
    function = code.function(name, [kind for _, kind in params] + ["i64"])
    _alive.append(code)
    return function


# Machine code is never freed: compiled functions are cached for the life of the process by their users.
_alive: list[CompiledModule] = []


def pieces(registers: int) -> tuple[int, ...]:
    """The row counts for which tiles are generated, largest last: few, as each costs compile time."""
    return (1, 2, 3, 4, 6) if registers < 32 else (1, 2, 3, 4, 6, 8, 12)


def split_table(sizes: Sequence[int]) -> list[int]:
    """Entry n: how many rows to do first when n remain, so that no remainder is needlessly small.

    `sizes` are the available row counts; every n that occurs must be a sum of some. Entries reach twice the largest
    size; with more rows than that, the last entry holds.
    """
    largest = max(sizes)
    best: list[tuple[int, int]] = [(0, 0)]  # (number of pieces, first piece) for each n
    for n in range(1, 2 * largest + 1):
        options = [(best[n - size][0] + 1, abs(n - 2 * size), size) for size in sizes if size <= n]
        count, _, size = min(options, default=(n, 0, 0))
        best.append((count, size))
    best[2 * largest] = (2, largest)
    return [size for _, size in best]


def threads_for(elements: int, threads: int | None) -> int:
    """The thread count of an elementwise call: 1 for small ones, else `threads` or torch's setting."""
    if elements < _SERIAL_ELEMENTS:
        return 1
    return team_size(threads)


def dtype_name(op: str, tensor: torch.Tensor) -> str:
    """ "f32" or "bf16". Raises TypeError for other dtypes."""
    name = DTYPES.get(tensor.dtype)
    if name is None:
        raise TypeError(f"{op}: float32 or bfloat16 is needed, not {tensor.dtype}")
    return name
