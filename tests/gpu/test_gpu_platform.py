"""The platform on a real card: what it says is what torch says, and its copies, events, graphs and measurements work."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hotswap.core.config import EngineConfig
from hotswap.core.contracts import DeviceInfo, Platform, UsageError
from hotswap.core.runner.kv_cache import GIB, MemoryTable
from hotswap.core.runner.memory_report import guard_part
from hotswap.core.testing.suites import PlatformSuite

ROCM = torch.version.hip is not None
MIB = 2**20


class TestContract(PlatformSuite):
    plugin = "hotswap.plugins.hardware.rocm" if ROCM else "hotswap.plugins.hardware.cuda"
    utilizations = (0.3, 0.6, 0.9)  # the tests before this one hold something, too


def facts() -> DeviceInfo:
    from hotswap.plugins.hardware import cuda, rocm

    return rocm.device_facts(None) if ROCM else cuda.device_facts(None)


@pytest.fixture(scope="module")
def platform() -> Platform:
    from hotswap.plugins.hardware.accelerator.platform import AcceleratorPlatform

    made = AcceleratorPlatform(facts(), 0, deterministic=False, logger=logging.getLogger("hotswap.test"))
    made.initialize()
    return made


def test_probe_equals_torchs_facts(platform: Platform) -> None:
    found = platform.probe()
    properties = torch.cuda.get_device_properties(0)
    assert found.kind == ("rocm" if ROCM else "cuda")
    assert found.count == torch.cuda.device_count()
    # The driver counts what it keeps for itself.
    assert properties.total_memory <= found.memory_bytes <= properties.total_memory * 1.05
    if ROCM:
        assert properties.gcnArchName.partition(":")[0] in found.features
    else:
        assert found.name == properties.name
        assert found.capability == torch.cuda.get_device_capability(0)
    assert ("bf16" in found.features) == torch.cuda.is_bf16_supported(including_emulation=False)


def test_the_hooks_choose_it() -> None:
    """What this machine would serve with, through the manager."""
    from hotswap.core.clock import ManualClock
    from hotswap.core.contracts import BuildContext
    from hotswap.core.plugin_manager import PluginManager
    from hotswap.plugins import BUILTIN_PLUGINS

    manager = PluginManager(builtins=BUILTIN_PLUGINS)
    manager.load()
    context = BuildContext(
        options=None, config=EngineConfig(), device=DeviceInfo("host", "host"), clock=ManualClock(), role="api"
    )
    assert manager.choose("platform", context).name == ("rocm" if ROCM else "cuda")


def test_products_of_float32_are_exact(platform: Platform) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    found = (a.to(platform.torch_device()) @ b.to(platform.torch_device())).cpu()
    exact = a.double() @ b.double()
    assert (found.double() - exact).abs().max() < 1e-3  # TF32 is off by about 0.03


def test_pinned_copies_do_not_wait(platform: Platform) -> None:
    host = platform.pinned((8 * MIB,), torch.float32)
    assert host.is_pinned() and host.shape == (8 * MIB,) and host.dtype is torch.float32
    host.copy_(torch.arange(8 * MIB, dtype=torch.float32))
    torch.cuda.set_sync_debug_mode("error")
    try:
        device = host.to(platform.torch_device(), non_blocking=True)
        device += 1
        back = platform.pinned((8 * MIB,), torch.float32)
        back.copy_(device, non_blocking=True)
        event = platform.event()
        event.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    event.synchronize()
    assert torch.equal(back, torch.arange(8 * MIB, dtype=torch.float32) + 1)


def test_an_event_lets_other_threads_run(platform: Platform) -> None:
    """Waiting for the card holds no lock of Python's."""
    counted = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal counted
        while not ended.is_set():
            counted += 1

    big = torch.randn(8192, 8192, device=platform.torch_device())
    platform.synchronize()
    for _ in range(20):
        big = (big @ big).clamp_(-1, 1)
    event = platform.event()
    event.record()
    thread = threading.Thread(target=count)
    thread.start()
    before = counted
    event.synchronize()
    during = counted - before
    ended.set()
    thread.join()
    assert during > 100


def test_a_graph_repeats_the_work_over_the_same_memory(platform: Platform) -> None:
    given = torch.zeros(1024, device=platform.torch_device())
    result = torch.empty_like(given)

    def run() -> None:
        result.copy_(given * 2 + 1)

    run()
    result.fill_(-1)
    graph = platform.capture(run)
    platform.synchronize()
    assert bool(result.eq(-1).all()), "capture ran the work"
    for value in (1.0, 7.0):
        given.fill_(value)
        graph.replay()
        assert bool(result.eq(value * 2 + 1).all())


def test_graphs_share_their_memory(platform: Platform) -> None:
    """Captured largest first, a ladder takes little more than its largest."""
    device = platform.torch_device()
    weight = torch.randn(4096, 4096, device=device)
    rows = torch.randn(2048, 4096, device=device)

    def work(size: int) -> Callable[[], Any]:
        return lambda: (rows[:size] @ weight).relu() @ weight

    work(2048)()
    platform.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphs = [platform.capture(work(2048))]
    one = torch.cuda.memory_reserved() - before
    graphs += [platform.capture(work(size)) for size in (1024, 512, 256, 128, 64)]
    assert torch.cuda.memory_reserved() - before <= one * 1.25 + 32 * MIB
    for graph in graphs:
        graph.replay()
    platform.synchronize()


def test_results_that_are_lent_stay_until_the_next_replay(platform: Platform) -> None:
    """A ladder whose results are all given up takes little more than its largest graph. Each result is whole after its graph's
    replay, whatever ordinary tensors come and go and whatever torch gives back to the driver meanwhile."""
    device = platform.torch_device()
    width, sizes = 32_768, (512, 384, 256, 128, 64, 8, 1)
    given = torch.zeros(512, 1, device=device)
    columns = torch.arange(width, device=device, dtype=torch.float32)
    results: dict[int, torch.Tensor] = {}
    graphs: dict[int, Any] = {}

    def work(size: int) -> Callable[[], None]:
        def run() -> None:
            scratch = given[:size] * columns
            results[size] = scratch * 2 + 1

        return run

    work(sizes[0])()
    results.clear()
    platform.synchronize()
    torch.cuda.empty_cache()
    before, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for size in sizes:
        graphs[size] = platform.capture(work(size))
        results[size] = platform.graph_result(results[size])
        if size == sizes[0]:
            one = torch.cuda.memory_reserved() - before
    assert torch.cuda.memory_reserved() - before <= one * 1.1 + 32 * MIB
    # A few bytes stay: the generator's seed and offset, where torch lets graphs read them.
    assert torch.cuda.memory_allocated() <= allocated + 4096, "results are still held"
    order = random.Random(1).choices(sizes, k=40)
    for turn, size in enumerate(order):
        given.fill_(turn)
        graphs[size].replay()
        for count in (size, 16, 1):  # ordinary tensors of the same sizes, of which none may lie there
            torch.full((count, width), float("nan"), device=device)
        if turn % 8 == 0:
            torch.cuda.empty_cache()
            torch.full((size, width), float("nan"), device=device)
        assert torch.equal(results[size], (turn * columns * 2 + 1).expand(size, width)), (turn, size)
        results[size].fill_(float("nan"))  # readers may write there
    graphs.clear()


def test_a_graph_can_be_replayed_between_other_work(platform: Platform) -> None:
    """Graphs are captured beside the stream in which everything runs, and replayed in it, in order."""
    given = torch.zeros(1, device=platform.torch_device())

    def run() -> None:
        given.add_(1)

    graph = platform.capture(run)
    for _ in range(50):
        graph.replay()
        given.mul_(2)
    assert given.item() == pytest.approx(2.0**51 - 2, rel=1e-6)


_BROKEN_CAPTURE = """
import logging, sys, torch
from hotswap.core.contracts import PluginError
from hotswap.plugins.hardware import cuda, rocm
from hotswap.plugins.hardware.accelerator.platform import AcceleratorPlatform

facts = (rocm if torch.version.hip else cuda).device_facts(None)
platform = AcceleratorPlatform(facts, 0, deterministic=False, logger=logging.getLogger("test"))
platform.initialize()
given = torch.ones(1, device=platform.torch_device())
try:
    platform.capture(lambda: print(given.item()))
except PluginError as error:
    print("REFUSED", error)
"""


def test_what_cannot_be_recorded_is_said() -> None:
    """In a process of its own: torch's allocator need not be whole after a capture that broke."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _BROKEN_CAPTURE]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert "REFUSED a step cannot be recorded as a graph: " in result.stdout, result.stderr
    assert "--enforce-eager serves without graphs" in result.stdout


def test_peak_bytes(platform: Platform) -> None:
    held: list[torch.Tensor] = []

    def run() -> None:
        held.append(torch.empty(64 * MIB, dtype=torch.uint8, device=platform.torch_device()))
        torch.empty(256 * MIB, dtype=torch.uint8, device=platform.torch_device())

    assert platform.peak_bytes(run) == 320 * MIB
    held.clear()
    assert platform.peak_bytes(lambda: None) == 0


def test_kv_cache_bytes(platform: Platform) -> None:
    from hotswap.plugins.hardware.accelerator.budget import RESERVE_BYTES

    torch.cuda.empty_cache()
    total = platform.memory().total_bytes
    bare = platform.kv_cache_bytes(0.8)
    memory = platform.memory()
    expected = int(total * 0.8) - (total - memory.available_bytes) - RESERVE_BYTES
    assert bare == pytest.approx(expected, abs=64 * MIB)  # others may come and go
    assert platform.kv_cache_bytes(0.8, 3 * GIB) == pytest.approx(bare - 3 * GIB, abs=64 * MIB)
    weights = torch.empty(2 * GIB, dtype=torch.uint8, device=platform.torch_device())
    assert platform.kv_cache_bytes(0.8) == pytest.approx(bare - 2 * GIB, abs=64 * MIB)
    del weights  # what torch keeps for later does not count
    assert platform.kv_cache_bytes(0.8) == pytest.approx(bare, abs=64 * MIB)
    with pytest.raises(UsageError, match="no memory is left for the KV cache"):
        platform.kv_cache_bytes(0.5, total)


def test_out_of_memory_is_explained(platform: Platform) -> None:
    table = MemoryTable([("weights", GIB)])
    explained = r"out of memory in the part 'KV cache'.* Lower --gpu-memory-utilization"
    with pytest.raises(UsageError, match=explained), guard_part("KV cache", table, platform, EngineConfig()):
        platform.empty_kv_cache((platform.memory().total_bytes * 2,), torch.uint8)
    assert platform.empty_kv_cache((MIB,), torch.uint8).numel() == MIB  # the card still works


def test_every_thread_enters(platform: Platform) -> None:
    devices: list[int] = []

    def run() -> None:
        platform.enter_thread()
        devices.append(torch.cuda.current_device())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert devices == [0]
