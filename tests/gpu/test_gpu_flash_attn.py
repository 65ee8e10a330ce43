"""FlashAttention and FlashInfer on the card, as far as they are installed: the conformance suite, no waiting, and graphs."""

from __future__ import annotations

import pytest
import torch
from graphed_attention import GRAPHED, replays
from torch import Tensor

from hotswap.core.clock import ManualClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.attention import AttentionBackend, AttentionContext, AttentionLayer, CacheSpec
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.testing.finding import find_provider
from hotswap.core.testing.paged_steps import PagedStep, make_paged_step
from hotswap.core.testing.suites import AttentionSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
FLASH_ATTN = "hotswap.plugins.attention.flash_attn"
FLASHINFER = "hotswap.plugins.attention.flashinfer"


def card() -> DeviceInfo:
    if not torch.cuda.is_available():
        return DeviceInfo("cuda", "no card")
    return DeviceInfo("cuda", torch.cuda.get_device_name(), torch.cuda.get_device_capability())


class OnTheCard(AttentionSuite):
    torch_device = "cuda"
    device = card()
    max_cases = 2


class SplitsByBatch(OnTheCard):
    def test_rows_do_not_depend_on_batch_mates(self) -> None:
        pytest.skip("it splits contexts as the whole batch asks for, and is refused under --deterministic")


class TestFlashAttention(SplitsByBatch):
    plugin = FLASH_ATTN
    name = "flash_attn"


class TestFlashAttention4(OnTheCard):
    plugin = FLASH_ATTN
    name = "flash_attn_4"


class TestFlashInfer(SplitsByBatch):
    plugin = FLASHINFER


HEADS, KV_HEADS, SIZE = 32, 8, 128
WINDOWS = (None, 20, None)


def layer(index: int) -> AttentionLayer:
    return AttentionLayer(index, HEADS, KV_HEADS, SIZE, SIZE, SIZE**-0.5, window=WINDOWS[index])


def built(name: str, block_size: int) -> AttentionBackend:
    found = find_provider("attention", FLASH_ATTN, name)
    context = AttentionContext(
        options=None,
        config=EngineConfig(),
        device=card(),
        clock=ManualClock(),
        spec=CacheSpec("full", KV_HEADS, SIZE, SIZE, "bfloat16"),
        block_size=block_size,
        layers=tuple(map(layer, range(len(WINDOWS)))),
    )
    reasons = PluginManager().reasons_against(found, context)
    if reasons:
        pytest.skip(f"cannot run here: {'; '.join(reasons)}")
    backend: AttentionBackend = found.provider.build(context)
    return backend


def steps(backend: AttentionBackend, block_size: int) -> list[PagedStep]:
    """Two decode steps of equal shapes, over caches of equal sizes."""
    contexts = (((1, 700), (1, 33), (1, 511)), ((1, 650), (1, 60), (1, 540)))
    return [
        make_paged_step(
            backend.layout, layer(0), lengths, block_size=block_size, dtype=torch.bfloat16, device="cuda", seed=seed
        )
        for seed, lengths in enumerate(contexts)
    ]


class Layers:
    """Layers with caches of their own, over one step's tensors."""

    def __init__(self, backend: AttentionBackend, step: PagedStep, num_blocks: int) -> None:
        self.backend, self.step = backend, step
        self.caches = [
            tuple(
                torch.zeros(num_blocks, *stored.shape[1:], dtype=stored.dtype, device="cuda") for stored in step.cache
            )
            for _ in WINDOWS
        ]
        self.outs: list[Tensor] = []

    def load(self, step: PagedStep) -> None:
        """Makes the tensors hold what `step` has."""
        mine, other = self.step.geometry, step.geometry
        table = other.block_table.clone()
        mine.block_table.zero_()
        mine.block_table[:, : table.shape[1]].copy_(table)
        for target, source in (
            (mine.seq_lens, other.seq_lens),
            (mine.slot_mapping, other.slot_mapping),
            (self.step.query, step.query),
            (self.step.key, step.key),
            (self.step.value, step.value),
        ):
            target.copy_(source)
        for cache in self.caches:
            for stored, new in zip(cache, step.cache, strict=True):
                stored[: len(new)].copy_(new)

    def run(self) -> None:
        self.outs.clear()
        for index, (keys, values) in enumerate(self.caches):
            self.backend.write_kv(self.step.key, self.step.value, (keys, values))
            self.outs.append(self.backend.forward(self.step.query, (keys, values), layer(index)))

    def check(self, expected: list[Tensor]) -> None:
        for out, wanted in zip(self.outs, expected, strict=True):
            torch.testing.assert_close(out.double().cpu(), wanted, rtol=2**-7, atol=2**-7)


def expected(step: PagedStep) -> list[Tensor]:
    return [step.expected(layer(index)) for index in range(len(WINDOWS))]


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_4"])
def test_a_step_waits_for_nothing(name: str, block_size: int) -> None:
    backend = built(name, block_size)
    step = steps(backend, block_size)[0]
    layers = Layers(backend, step, len(step.cache[0]))
    layers.load(step)
    backend.prepare(step.geometry)
    layers.run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.prepare(step.geometry)
        layers.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    layers.check(expected(step))


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_4"])
def test_a_captured_decode_step_follows_what_changes(name: str, block_size: int) -> None:
    """Recorded after one `prepare`, as the runner does it; replayed over other contexts in other blocks."""
    backend = built(name, block_size)
    both = steps(backend, block_size)
    wanted = [expected(step) for step in both]
    mine = make_paged_step(
        backend.layout, layer(0), ((1, 1000),) * 3, block_size=block_size, dtype=torch.bfloat16, device="cuda", seed=9
    )
    mine.geometry.max_seq_len = 1000
    layers = Layers(backend, mine, max(len(step.cache[0]) for step in both))
    layers.load(both[0])
    backend.prepare(mine.geometry)
    layers.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers.run()
    for step, outputs in [*zip(both, wanted, strict=True)][::-1]:
        layers.load(step)
        graph.replay()
        layers.check(outputs)


@pytest.mark.parametrize("window", [None, 40])
def test_version_4_in_a_graph_serves_whatever_its_buffers_say(window: int | None) -> None:
    """Any rows, not decode alone: that is what it declares. One capture, then steps of other lengths, rows and padding."""
    backend = built("flash_attn_4", 16)
    assert backend.capabilities.graph_capture == "any"
    given = AttentionLayer(0, HEADS, KV_HEADS, SIZE, SIZE, SIZE**-0.5, window=window)
    steps = [
        make_paged_step(backend.layout, given, contexts, block_size=16, dtype=torch.bfloat16, device="cuda", seed=seed)
        for seed, contexts in enumerate(GRAPHED)
    ]
    for step, out in replays(backend, given, steps):
        torch.testing.assert_close(out.double().cpu(), step.expected(given), rtol=2**-7, atol=2**-7)
