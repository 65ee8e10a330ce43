"""Out of memory, for the reader: at start which part, how large, how much was free; later in a step; and the one flag to
change."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..config import EngineConfig
from ..contracts.platform import MemorySnapshot, Platform
from ..errors import UsageError
from .kv_cache import GIB, MemoryTable

# What start-up takes memory for, in the order in which it does.
Part = Literal["weights", "largest step", "sampling", "KV cache", "request tables", "graphs"]

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
# What libraries below torch's allocator say, in errors that are no torch.OutOfMemoryError.
_PHRASES = ("out of memory", "BLAS_STATUS_ALLOC_FAILED")
_SMALL_GRAPH_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Shortage:
    """One attempt that failed. before, now: the device when the part began and when it failed. platform: its name. part_bytes:
    what the part takes in all, where that is known before. asked_bytes: the allocation that failed, where the error says it."""

    part: Part
    before: MemorySnapshot
    now: MemorySnapshot
    platform: str
    part_bytes: int | None = None
    asked_bytes: int | None = None


def explain_out_of_memory(shortage: Shortage, table: MemoryTable, config: EngineConfig) -> str:
    """One line: what failed, the parts that were there already, and the one flag to change."""
    before, now = shortage.before, shortage.now
    size = "" if shortage.part_bytes is None else f" ({_gib(shortage.part_bytes)} in all)"
    taken = max(0, before.available_bytes - now.available_bytes)
    asked = "" if shortage.asked_bytes is None else f" and {_gib(shortage.asked_bytes)} more were asked for"
    held = table.held()
    others = max(0, before.total_bytes - before.available_bytes - sum(num_bytes for _, num_bytes in held))
    parts = [f"{part} {_gib(num_bytes)}" for part, num_bytes in held]
    parts.append(f"other processes, the driver and the like {_gib(others)}")
    return (
        f"out of memory in the part {shortage.part!r}{size}: of {_gib(before.total_bytes)}, "
        f"{_gib(before.available_bytes)} were free when it began; it had taken {_gib(taken)}{asked}. "
        f"Held before: {', '.join(parts)}. {_advice(shortage, others, config)}"
    )


def _advice(shortage: Shortage, others: int, config: EngineConfig) -> str:
    """One flag, chosen by the part; other processes come first where the part would have fitted without them."""
    needed = shortage.part_bytes
    free = shortage.before.available_bytes
    if needed is not None and free < needed <= free + others and others > shortage.before.total_bytes // 10:
        another = f"--plugin platform={shortage.platform},device=N"
        return f"End the other processes on this device, or take another one with {another}"
    if shortage.part == "weights":
        if config.model.dtype == "float32":
            return "Give --dtype bfloat16, which halves them"
        return "Give a smaller or quantized --model"
    if shortage.part in ("sampling", "request tables"):
        return f"Lower --max-num-seqs{_now(config.scheduler.max_num_seqs)}"
    if shortage.part == "largest step":
        return f"Lower --max-num-batched-tokens{_now(config.scheduler.max_num_batched_tokens)}"
    if shortage.part == "graphs":
        if config.max_graph_tokens <= _SMALL_GRAPH_TOKENS:
            return "Give --enforce-eager"
        return f"Lower --max-graph-tokens{_now(config.max_graph_tokens)}"
    return _cache_advice(config)


def _cache_advice(config: EngineConfig) -> str:
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return f"Lower --num-gpu-blocks-override{_now(cache.num_gpu_blocks_override)}"
    if cache.kv_cache_memory_bytes is not None:
        return f"Lower --kv-cache-memory-bytes{_now(cache.kv_cache_memory_bytes)}"
    return f"Lower --gpu-memory-utilization{_now(cache.gpu_memory_utilization)}"


def explain_step_out_of_memory(error: BaseException, config: EngineConfig) -> str | None:
    """The same for a step while serving, where the error, or what it was raised for, is a device's "out of memory"; None for
    any other."""
    shortage = next((cause for cause in _causes(error) if is_out_of_memory(cause)), None)
    if shortage is None:
        return None
    asked_bytes = _asked_bytes(str(shortage))
    asked = "" if asked_bytes is None else f" when {_gib(asked_bytes)} more were asked for"
    return f"the device ran out of memory in a step{asked}. {_cache_advice(config)}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it was raised for, to the innermost."""
    seen: set[int] = set()
    inner: BaseException | None = error
    while inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        yield inner
        inner = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory: torch's own error, or what a library below it says."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


@contextlib.contextmanager
def guard_part(
    part: Part, table: MemoryTable, platform: Platform, config: EngineConfig, part_bytes: int | None = None
) -> Iterator[None]:
    """Around the code that takes a part's memory. Turns a device's "out of memory" into UsageError; all else comes through."""
    before = platform.memory()
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        kind, asked_bytes = platform.probe().kind, _asked_bytes(str(error))
        shortage = Shortage(part, before, platform.memory(), kind, part_bytes, asked_bytes)
        raise UsageError(explain_out_of_memory(shortage, table, config)) from error


def _asked_bytes(message: str) -> int | None:
    found = _ASKED.search(message)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def _now(value: object) -> str:
    return "" if value is None else f" (now {value})"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
