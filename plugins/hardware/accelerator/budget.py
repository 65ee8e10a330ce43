"""How much of a card the KV cache may take: arithmetic, no device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotswap.core.contracts import UsageError

GIB = 2**30
# What is taken after the measurement and not counted by it: kernels that the driver loads when they first run, gaps between
# tensors.
RESERVE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Bytes. own: the tensors of this process, weights first of all. What is neither free nor own belongs to other processes
    and the driver."""

    total: int
    free: int
    own: int

    @property
    def others(self) -> int:
        return self.total - self.free - self.own


def kv_cache_budget(memory: CardMemory, utilization: float, step_bytes: int, kind: str = "cuda") -> int:
    """utilization x total, less what is in use by anyone, the largest step, and the reserve. Raises UsageError with every part
    and the one flag to change when nothing is left."""
    granted = int(memory.total * utilization)
    left = granted - (memory.total - memory.free) - step_bytes - RESERVE_BYTES
    if left > 0:
        return left
    parts = (
        f"{_gib(memory.own)} weights and buffers, {_gib(memory.others)} other processes and the driver, "
        f"{_gib(step_bytes)} largest step, {_gib(RESERVE_BYTES)} reserve"
    )
    raise UsageError(
        f"no memory is left for the KV cache: --gpu-memory-utilization {utilization:g} grants {_gib(granted)} of "
        f"{_gib(memory.total)}; taken: {parts}. {_advice(memory, utilization, step_bytes, kind)}"
    )


def _advice(memory: CardMemory, utilization: float, step_bytes: int, kind: str) -> str:
    """One flag."""
    taken = memory.total - memory.free + step_bytes + RESERVE_BYTES
    enough = math.ceil(taken / memory.total * 100 + 1) / 100
    if utilization < enough <= 0.97:
        return f"Raise --gpu-memory-utilization to {enough:g} or more"
    if memory.others > memory.own and memory.others > step_bytes:
        return f"End the other processes, or take another card with --plugin platform={kind},device=N"
    if step_bytes > memory.own:
        return "Make the largest step smaller with --max-num-batched-tokens"
    return "The weights leave no room: give a smaller or quantized --model"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
