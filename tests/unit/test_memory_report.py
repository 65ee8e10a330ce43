"""Out of memory at start: what the one line says, for each part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hotswap.core.config import EngineConfig
from hotswap.core.contracts import DeviceInfo, MemorySnapshot
from hotswap.core.errors import UsageError
from hotswap.core.runner.kv_cache import GIB, MemoryTable
from hotswap.core.runner.memory_report import Part, guard_part, is_out_of_memory
from hotswap.core.testing.templates.platform import MyPlatform, MyPlatformOptions

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which ..."


class Card(MyPlatform):
    """Says how much is free, in GiB, one answer after the other."""

    def __init__(self, *free: float, total: float = 80) -> None:
        super().__init__(MyPlatformOptions())
        self._total = total
        self._free: Iterator[float] = iter(free)

    def probe(self) -> DeviceInfo:
        return DeviceInfo("cuda", "a card")

    def memory(self) -> MemorySnapshot:
        return MemorySnapshot(int(self._total * GIB), int(next(self._free) * GIB))


def message_of(part: Part, card: Card, table: MemoryTable, part_bytes: int | None = None, **settings: Any) -> str:
    config = EngineConfig.from_flat(**settings)
    with pytest.raises(UsageError) as caught, guard_part(part, table, card, config, part_bytes):
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    message = str(caught.value)
    assert "\n" not in message
    assert message.count("--") == 1, "one flag to change"
    return message


def table(**rows: float) -> MemoryTable:
    return MemoryTable([(name.replace("_", " "), int(size * GIB)) for name, size in rows.items()])


def test_the_whole_line() -> None:
    message = message_of("largest step", Card(60, 10), table(weights=16), max_num_batched_tokens=65536)
    assert message == (
        "out of memory in the part 'largest step': of 80.00 GiB, 60.00 GiB were free when it began; it had taken 50.00 GiB "
        "and 2.00 GiB more were asked for. Held before: weights 16.00 GiB, other processes, the driver and the like "
        "4.00 GiB. Lower --max-num-batched-tokens (now 65536)"
    )


@pytest.mark.parametrize(
    ("part", "settings", "advice"),
    [
        ("weights", {}, "Give a smaller or quantized --model"),
        ("weights", {"dtype": "float32"}, "Give --dtype bfloat16, which halves them"),
        ("sampling", {"max_num_seqs": 512}, "Lower --max-num-seqs (now 512)"),
        ("request tables", {}, "Lower --max-num-seqs (now 256)"),
        ("largest step", {}, "Lower --max-num-batched-tokens"),
        ("KV cache", {}, "Lower --gpu-memory-utilization (now 0.9)"),
        ("KV cache", {"kv_cache_memory_bytes": 2**40}, f"Lower --kv-cache-memory-bytes (now {2**40})"),
        ("KV cache", {"num_gpu_blocks_override": 9}, "Lower --num-gpu-blocks-override (now 9)"),
        ("graphs", {"max_graph_tokens": 512}, "Lower --max-graph-tokens (now 512)"),
        ("graphs", {"max_graph_tokens": 16}, "Give --enforce-eager"),
    ],
)
def test_one_flag_for_each_part(part: Part, settings: dict[str, Any], advice: str) -> None:
    assert message_of(part, Card(60, 1), table(weights=16), **settings).endswith(advice)


def test_other_processes_come_first_where_it_would_have_fitted_without_them() -> None:
    message = message_of("weights", Card(30, 1), table(), part_bytes=70 * GIB)
    assert "(70.00 GiB in all)" in message
    assert message.endswith(
        "End the other processes on this device, or take another one with --plugin platform=cuda,device=N"
    )
    too_large = message_of("weights", Card(30, 1), table(), part_bytes=90 * GIB)
    assert too_large.endswith("Give a smaller or quantized --model")
    alone = message_of("weights", Card(79, 1), table(), part_bytes=int(79.5 * GIB))
    assert alone.endswith("Give a smaller or quantized --model")


def test_what_was_measured_only_is_not_held() -> None:
    """The largest step's memory is free again: it must not hide what other processes have."""
    parts = table(weights=16)
    parts.plan("largest step", 4 * GIB)
    parts.plan("sampling", GIB)
    message = message_of("KV cache", Card(40, 1), parts, part_bytes=50 * GIB)
    assert "Held before: weights 16.00 GiB, other processes, the driver and the like 24.00 GiB." in message
    parts.add("KV cache", 39 * GIB)
    parts.take("sampling")
    message = message_of("graphs", Card(0, 0), parts)
    assert "weights 16.00 GiB, sampling 1.00 GiB, KV cache 39.00 GiB, other" in message
    assert parts.lines()[-1].split()[1] == "60.000", "the log has all of them"


def test_errors_of_libraries_below_torch() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(ValueError("out of memory"))
    not_told = r"it had taken 1.00 GiB\. Held"  # what was asked for
    with pytest.raises(UsageError, match=not_told), guard_part("graphs", table(), Card(5, 4), EngineConfig()):
        raise RuntimeError("CUDA error: out of memory")


def test_everything_else_comes_through() -> None:
    with pytest.raises(KeyError), guard_part("weights", table(), Card(60), EngineConfig()):
        raise KeyError("model.norm.weight")
    with guard_part("weights", table(), Card(60), EngineConfig()):
        pass
