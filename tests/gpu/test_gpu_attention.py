"""The Triton attention backend on the card: the conformance suite, every head size, long contexts, graphs."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from graphed_attention import GRAPHED, replays

from hotswap.core.contracts.attention import AttentionLayer
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.testing.paged_steps import PagedStep, make_paged_step
from hotswap.core.testing.suites import AttentionSuite
from hotswap.core.testing.suites.attention import TOLERANCES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def card() -> DeviceInfo:
    if not torch.cuda.is_available():
        return DeviceInfo("cuda", "no card")
    kind = "rocm" if torch.version.hip else "cuda"
    return DeviceInfo(kind, torch.cuda.get_device_name(), torch.cuda.get_device_capability())


class TestTritonPaged(AttentionSuite):
    plugin = "hotswap.plugins.attention.triton_paged"
    torch_device = "cuda"
    device: ClassVar[DeviceInfo | None] = card()


class TestTorchReference(AttentionSuite):
    plugin = "hotswap.plugins.attention.torch_reference"
    torch_device = "cuda"
    device: ClassVar[DeviceInfo | None] = card()
    max_cases = 1


def backend(**options: Any) -> Any:
    from hotswap.plugins.attention.triton_paged.backend import TritonPagedAttention

    return TritonPagedAttention(card(), **options)


def make(layer: AttentionLayer, contexts: tuple[tuple[int, int], ...], **options: Any) -> PagedStep:
    options = {"block_size": 16, "device": "cuda", "dtype": torch.bfloat16, **options}
    return make_paged_step(backend().layout, layer, contexts, **options)


def check(step: PagedStep, layer: AttentionLayer, found: torch.Tensor) -> None:
    relative, absolute = TOLERANCES[found.dtype]
    found = found[: step.geometry.num_tokens].double().cpu()
    torch.testing.assert_close(found, step.expected(layer), rtol=relative, atol=absolute)


MIXED = ((1, 700), (150, 300), (5, 90), (9, 33), (1, 1), (64, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [16, 64, 80, 96, 128, 192, 256])
def test_head_sizes(size: int, dtype: torch.dtype) -> None:
    layer = AttentionLayer(0, 8, 2, size, size, size**-0.5)
    step = make(layer, MIXED, dtype=dtype)
    for deterministic in (False, True):
        check(step, layer, step.run(backend(deterministic=deterministic), layer))


@pytest.mark.parametrize("heads", [(32, 8), (9, 3), (28, 4), (7, 7), (12, 1), (40, 1), (71, 1)])
def test_head_groups(heads: tuple[int, int]) -> None:
    layer = AttentionLayer(0, *heads, 64, 64, 0.125)
    step = make(layer, MIXED)
    check(step, layer, step.run(backend(), layer))


@pytest.mark.parametrize("window", [1, 64, 100, 513])
def test_windows(window: int) -> None:
    layer = AttentionLayer(0, 8, 2, 128, 128, 0.088, window=window)
    step = make(layer, MIXED)
    check(step, layer, step.run(backend(), layer))


def test_soft_cap_sinks_and_slopes() -> None:
    by_head = torch.linspace(-1, 2, 8, device="cuda")
    for fields in (
        {"soft_cap": 30.0, "window": 200},
        {"sinks": by_head.to(torch.bfloat16)},
        {"alibi_slopes": by_head.abs() / 16},
    ):
        layer = AttentionLayer(0, 8, 2, 128, 128, 0.088, **fields)
        step = make(layer, MIXED)
        check(step, layer, step.run(backend(), layer))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_caches(name: str) -> None:
    if name == "float8_e4m3fn" and card().capability < (8, 9):
        pytest.skip("this card has no such type")
    layer = AttentionLayer(0, 8, 2, 128, 128, 0.088)
    step = make(layer, MIXED, cache_dtype=getattr(torch, name))
    check(step, layer, step.run(backend(), layer))


@pytest.mark.parametrize("block_size", [16, 32, 128, 24])
def test_block_sizes(block_size: int) -> None:
    layer = AttentionLayer(0, 8, 2, 128, 128, 0.088)
    step = make(layer, MIXED, block_size=block_size)
    check(step, layer, step.run(backend(), layer))


def test_long_contexts() -> None:
    layer = AttentionLayer(0, 8, 2, 128, 128, 0.088)
    step = make(layer, ((1, 32000), (1, 100), (5, 9000), (40, 16384)))
    check(step, layer, step.run(backend(), layer))


def test_a_cache_of_more_than_two_billion_elements() -> None:
    """Offsets into the cache take 64 bits."""
    layer = AttentionLayer(0, 8, 8, 128, 128, 0.088)
    step = make(layer, ((1, 300), (40, 200)))
    num_blocks = 2**31 // (16 * 8 * 128) + 64
    shift = num_blocks - len(step.cache[0])
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB")
    cache = []
    for stored in step.cache:
        large = torch.empty((num_blocks, *stored.shape[1:]), dtype=stored.dtype, device="cuda")
        large[shift:] = stored
        cache.append(large)
    step.cache = (cache[0], cache[1])
    step.geometry.block_table += shift
    step.geometry.slot_mapping += shift * 16
    check(step, layer, step.run(backend(), layer))


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("window", [None, 200])
def test_deterministic_bits_depend_on_the_context_alone(window: int | None, soft_cap: float | None) -> None:
    layer = AttentionLayer(0, 32, 8, 128, 128, 0.088, window=window, soft_cap=soft_cap)
    step = make(layer, ((700, 900), (1, 90), (40, 500)), padding=3)
    together = step.run(backend(deterministic=True), layer)
    for request in range(3):
        alone = step.alone(request).run(backend(deterministic=True), layer)
        assert torch.equal(alone, together[step.rows_of(request)])
    last = step.alone(0)
    last.query, last.key, last.value = last.query[-1:], last.key[-1:], last.value[-1:]
    last.geometry.query_start_loc = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    last.geometry.slot_mapping = last.geometry.slot_mapping[-1:]
    last.geometry.num_tokens = last.geometry.max_query_len = 1
    assert torch.equal(last.run(backend(deterministic=True), layer)[0], together[699])


def test_a_graph_serves_whatever_its_buffers_say() -> None:
    """One capture, then steps of other lengths, other rows and padding, without a wait for the device."""
    layer = AttentionLayer(0, 8, 2, 128, 128, 0.088)
    steps = [make(layer, contexts, seed=seed) for seed, contexts in enumerate(GRAPHED)]
    for step, out in replays(backend(), layer, steps):
        check(step, layer, out)
        torch.testing.assert_close(out, step.run(backend(), layer), rtol=2**-6, atol=2**-6)
