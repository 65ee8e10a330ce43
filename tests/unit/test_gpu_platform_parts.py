"""The platform of a card without one: its arithmetic, its data types, and how it handles torch's answers, which are faked."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hotswap.core.contracts import DeviceInfo, MemorySnapshot, PluginError, UsageError
from hotswap.plugins.hardware.accelerator.budget import GIB, RESERVE_BYTES, CardMemory, kv_cache_budget
from hotswap.plugins.hardware.accelerator.platform import AcceleratorPlatform

H200 = DeviceInfo("cuda", "NVIDIA H200", (9, 0), 140 * GIB, features=frozenset({"bf16"}))
T4 = DeviceInfo("cuda", "Tesla T4", (7, 5), 15 * GIB)
MI300 = DeviceInfo("rocm", "AMD Instinct MI300X", memory_bytes=192 * GIB, features=frozenset({"gfx942", "bf16"}))


def make(info: DeviceInfo = H200, index: int = 0, *, deterministic: bool = False) -> AcceleratorPlatform:
    return AcceleratorPlatform(info, index, deterministic=deterministic, logger=logging.getLogger("hotswap.test"))


# The KV cache's share.


def test_kv_cache_budget_is_what_is_granted_less_every_part() -> None:
    memory = CardMemory(total=100 * GIB, free=70 * GIB, own=20 * GIB)
    assert memory.others == 10 * GIB
    assert kv_cache_budget(memory, 0.9, 5 * GIB) == 90 * GIB - 30 * GIB - 5 * GIB - RESERVE_BYTES


@pytest.mark.parametrize(
    ("memory", "utilization", "step", "advice"),
    [
        # There is room, it was not granted.
        (CardMemory(100 * GIB, 80 * GIB, 18 * GIB), 0.2, GIB, "Raise --gpu-memory-utilization to 0.23 or more"),
        # Somebody else is there.
        (CardMemory(100 * GIB, 2 * GIB, 18 * GIB), 0.9, GIB, "End the other processes, or take another card with"),
        # The largest step takes more than the weights.
        (CardMemory(100 * GIB, 70 * GIB, 28 * GIB), 0.9, 69 * GIB, "step smaller with --max-num-batched-tokens"),
        (CardMemory(100 * GIB, 3 * GIB, 95 * GIB), 0.9, 3 * GIB, "give a smaller or quantized --model"),
    ],
)
def test_no_memory_left(memory: CardMemory, utilization: float, step: int, advice: str) -> None:
    with pytest.raises(UsageError) as caught:
        kv_cache_budget(memory, utilization, step)
    message = str(caught.value)
    assert advice in message
    assert f"{memory.own / GIB:.2f} GiB weights and buffers" in message
    assert f"{memory.others / GIB:.2f} GiB other processes" in message
    assert f"{step / GIB:.2f} GiB largest step" in message
    # one flag besides the one whose share is told
    flags = {word for word in message.replace("(", " ").split() if word.startswith("--")}
    assert len(flags - {"--gpu-memory-utilization"}) <= 1
    assert "\n" not in message


def test_the_advised_utilization_is_enough() -> None:
    memory = CardMemory(100 * GIB, 80 * GIB, 18 * GIB)
    assert kv_cache_budget(memory, 0.23, GIB) > 0
    with pytest.raises(UsageError):
        kv_cache_budget(memory, 0.21, GIB)


# Data types.


@pytest.mark.parametrize(
    ("info", "checkpoint", "dtype"),
    [
        (H200, "float32", "float32"),
        (H200, "float16", "float16"),
        (H200, "bfloat16", "bfloat16"),
        (H200, "float8_e4m3fn", "bfloat16"),
        (MI300, "int8", "bfloat16"),
        (T4, "float32", "float32"),
        (T4, "float16", "float16"),
        (T4, "bfloat16", "float16"),
        (T4, "int8", "float16"),
    ],
)
def test_default_dtype(info: DeviceInfo, checkpoint: str, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert make(info).default_dtype(checkpoint) == dtype
    assert bool(caplog.records) == (checkpoint != dtype and dtype == "float16")
    assert make(info).activation_dtype(dtype) == dtype


# What torch says, faked.


class FakeGraph:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def capture_begin(self, **options: Any) -> None:
        self.calls.append("begin")
        self.options = options

    def capture_end(self) -> None:
        self.calls.append("end")
        if "broken" in self.calls:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.calls.append("replay")


class FakeCuda:
    """torch.cuda with one card that does nothing."""

    Stream = staticmethod(lambda index: f"stream of {index}")

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.device: int | None = None
        self.capability = (9, 0)
        self.allocated = 10 * GIB
        self.peak = 13 * GIB
        self.calls: list[str] = []
        self.num_pools = 0

    def set_device(self, index: int) -> None:
        self.device = index

    def synchronize(self, index: int) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.calls.append("mem_get_info")
        return 120 * GIB, 140 * GIB

    def memory_allocated(self, index: int) -> int:
        return self.allocated

    def max_memory_allocated(self, index: int) -> int:
        return self.peak

    def reset_peak_memory_stats(self, index: int) -> None:
        self.calls.append("reset")

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return self.capability

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")

    def graph_pool_handle(self) -> tuple[int, int]:
        self.num_pools += 1
        return (0, self.num_pools)

    def CUDAGraph(self) -> FakeGraph:
        self.graphs.append(FakeGraph())
        return self.graphs[-1]

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    zeros = torch.zeros

    def on_the_host(*shape: int, device: str) -> torch.Tensor:
        return zeros(*shape)

    monkeypatch.setattr(torch, "zeros", on_the_host)
    return fake


@pytest.fixture
def flags() -> Iterator[Any]:
    """torch's switches, put back afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32")
    before = {name: getattr(matmul, name) for name in names}
    conv = cudnn.allow_tf32
    yield matmul
    for name, value in before.items():
        setattr(matmul, name, value)
    cudnn.allow_tf32 = conv


def test_initialize(card: FakeCuda, flags: Any) -> None:
    flags.allow_tf32 = True
    make(index=1).initialize()
    assert card.device == 1
    assert not flags.allow_tf32 and not torch.backends.cudnn.allow_tf32
    assert flags.allow_bf16_reduced_precision_reduction
    make(deterministic=True).initialize()
    assert not flags.allow_bf16_reduced_precision_reduction and not flags.allow_fp16_reduced_precision_reduction
    make(MI300).initialize()


def test_a_card_that_cannot_be_opened(card: FakeCuda, monkeypatch: pytest.MonkeyPatch, flags: Any) -> None:
    def refuse(index: int) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(card, "set_device", refuse)
    with pytest.raises(PluginError, match="NVIDIA H200 cannot be opened: Torch not compiled with CUDA enabled"):
        make().initialize()


def test_another_card_than_the_drivers(card: FakeCuda, flags: Any) -> None:
    card.capability = (8, 0)
    with pytest.raises(PluginError, match=r"the driver says NVIDIA H200, torch compute capability 8.0: .*PCI_BUS_ID"):
        make().initialize()
    other = DeviceInfo("rocm", "AMD gfx90a", features=frozenset({"gfx90a"}))
    with pytest.raises(PluginError, match="the driver says AMD gfx90a, torch gfx942"):
        make(other).initialize()


def test_memory(card: FakeCuda) -> None:
    platform = make()
    assert platform.memory() == MemorySnapshot(140 * GIB, 120 * GIB)
    card.calls.clear()
    assert platform.kv_cache_bytes(0.5, 2 * GIB) == 70 * GIB - 20 * GIB - 2 * GIB - RESERVE_BYTES
    assert card.calls == ["synchronize", "empty_cache", "mem_get_info"]  # what torch keeps for later is not in use


def test_peak_bytes(card: FakeCuda) -> None:
    assert make().peak_bytes(lambda: card.calls.append("run")) == 3 * GIB
    assert card.calls == ["synchronize", "reset", "run", "synchronize", "empty_cache"]


def test_graphs_share_a_pool_and_a_stream(card: FakeCuda) -> None:
    platform = make()
    ran: list[bool] = []
    for _ in range(2):
        platform.capture(lambda: ran.append(gc.isenabled())).replay()
    assert [graph.calls for graph in card.graphs] == [["begin", "end", "replay"]] * 2
    assert card.graphs[0].options == card.graphs[1].options == {"pool": (0, 1), "capture_error_mode": "thread_local"}
    assert ran == [False, False] and gc.isenabled()


def test_a_graphs_result_holds_no_memory() -> None:
    storage = torch.arange(24, dtype=torch.int16)
    given = storage.view(torch.bfloat16).view(4, 6)[1:, ::2]
    found = make().graph_result(given)
    assert found.shape == given.shape and found.stride() == given.stride() and found.dtype == given.dtype
    assert found.data_ptr() == given.data_ptr() and torch.equal(found.view(torch.int16), given.view(torch.int16))
    found.zero_()
    assert not bool(given.view(torch.int16).any()) and bool(storage[:6].any())
    held = weakref.ref(given.untyped_storage())
    del given, storage
    assert held() is None, "it keeps what it was made of"


def test_a_step_that_cannot_be_captured(card: FakeCuda) -> None:
    def run() -> None:
        card.graphs[-1].calls.append("broken")
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")

    with pytest.raises(PluginError, match=r"not permitted when stream is capturing; --enforce-eager serves without"):
        make().capture(run)
    assert card.graphs[-1].calls == ["begin", "broken", "end"]
    assert gc.isenabled()


def test_no_memory_for_a_graph_is_told_as_such(card: FakeCuda) -> None:
    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError):
        make().capture(run)
    assert gc.isenabled()
