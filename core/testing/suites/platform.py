"""Conformance of kind `platform`. Needs torch; what the device itself does is checked only where it can be opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from ...contracts.platform import MemorySnapshot, Platform, PlatformProvider
from ...contracts.provider import DeviceInfo
from .base import ConformanceSuite

DTYPES = ("float32", "bfloat16", "float16")
CHECKPOINT_DTYPES = (*DTYPES, "float8_e4m3fn", "int8")
SHAPES = ((2, 3, 4), (1, 2, 7, 3, 5), (5,))


def _accelerator_is_open() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class PlatformSuite(ConformanceSuite):
    """utilizations: values of --gpu-memory-utilization to try."""

    kind = "platform"
    utilizations: ClassVar[tuple[float, ...]] = (0.1, 0.5, 0.9)

    @pytest.fixture
    def opened(self) -> Iterator[Platform]:
        """The platform after `initialize`; torch's thread count is put back afterwards."""
        num_threads = torch.get_num_threads()
        platform: Platform = self.build()
        platform.initialize()
        yield platform
        torch.set_num_threads(num_threads)

    def test_environment_is_names_and_strings(self, provider: PlatformProvider) -> None:
        """`environment` gives variables as strings, the same each time, and sets none itself."""
        before = dict(os.environ)
        variables = provider.environment()
        for name, value in variables.items():
            assert isinstance(name, str) and name, f"{name!r} is no variable's name"
            assert isinstance(value, str), f"{name} is {value!r}: a variable's value is a string"
        assert provider.environment() == variables
        assert dict(os.environ) == before, "environment() changed this process's environment"

    def test_probe_gives_plain_facts(self) -> None:
        """`probe` works before `initialize`, and says the same twice: kind, name, memory and count."""
        platform: Platform = self.build()
        found = platform.probe()
        assert isinstance(found, DeviceInfo)
        assert found.kind == found.kind.strip().lower() != "", f"kind {found.kind!r}"
        assert found.name, "the device has no name"
        assert found.memory_bytes > 0, f"memory_bytes is {found.memory_bytes}"
        assert found.count >= 1, f"count is {found.count}"
        assert platform.probe() == found

    def test_facts_are_what_probe_says(self, provider: PlatformProvider) -> None:
        """`facts`, where the provider has it, says of the device what `probe` will say."""
        if provider.facts is None:
            pytest.skip("it has no facts of its own: the host's processors are shown")
        platform: Platform = self.build()
        assert provider.facts(self.validated_options()) == platform.probe()

    def test_probe_opens_no_device(self) -> None:
        """Neither `probe` nor `unavailable` opens the accelerator: a context costs memory, and a fork would break it."""
        if _accelerator_is_open():
            pytest.skip("this process has opened an accelerator already")
        self.registered().provider.unavailable(self.context())
        self.build().probe()
        assert not _accelerator_is_open(), "the device was opened"

    def test_torch_device_can_be_used(self, opened: Platform) -> None:
        """`torch_device` is a string that torch takes for new tensors."""
        device = opened.torch_device()
        assert isinstance(device, str)
        assert torch.zeros(2, device=device).sum().item() == 0

    @pytest.mark.parametrize("checkpoint", CHECKPOINT_DTYPES)
    def test_dtypes_are_names(self, product: Platform, checkpoint: str) -> None:
        """`default_dtype` and `activation_dtype` give names of floating types, whatever the checkpoint is stored in."""
        dtype = product.default_dtype(checkpoint)
        assert isinstance(dtype, str) and dtype in DTYPES, f"default_dtype({checkpoint!r}) is {dtype!r}"
        activations = product.activation_dtype(dtype)
        assert isinstance(activations, str) and activations in DTYPES, f"activation_dtype({dtype!r}) is {activations!r}"

    def test_memory_adds_up(self, opened: Platform) -> None:
        """What is available is not more than there is, in bytes."""
        memory = opened.memory()
        assert isinstance(memory, MemorySnapshot)
        assert 0 <= memory.available_bytes <= memory.total_bytes, f"{memory}"
        assert memory.total_bytes > 2**20, f"{memory.total_bytes} bytes in all: are these bytes?"

    def test_kv_cache_fits_the_device(self, opened: Platform) -> None:
        """`kv_cache_bytes` is a whole number of bytes, and no more than is available, for any utilization."""
        for utilization in self.utilizations:
            size = opened.kv_cache_bytes(utilization)
            available = opened.memory().available_bytes
            assert isinstance(size, int), f"kv_cache_bytes({utilization}) is {size!r}"
            # The host's memory moves between the two questions.
            assert 0 <= size <= available * 1.25, f"{size} bytes at {utilization}, {available} are available"

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_empty_kv_cache_is_zero(self, opened: Platform, shape: tuple[int, ...], dtype: str) -> None:
        """`empty_kv_cache` gives zeros of the shape and type asked for, contiguous, on the device."""
        cache = opened.empty_kv_cache(shape, getattr(torch, dtype))
        assert tuple(cache.shape) == shape
        assert cache.dtype is getattr(torch, dtype)
        assert cache.device.type == torch.device(opened.torch_device()).type
        assert cache.is_contiguous()
        assert not cache.any().item(), "the cache is not zero"

    def test_caches_share_nothing(self, opened: Platform) -> None:
        """Each cache tensor is memory of its own, and can be written."""
        first, second = (opened.empty_kv_cache((4, 8), torch.float32) for _ in range(2))
        first.fill_(1.0)
        assert first.eq(1.0).all().item()
        assert not second.any().item(), "two caches share their memory"

    def test_synchronize_waits(self, opened: Platform) -> None:
        """After `synchronize` the device has done what was asked of it; with nothing to do it returns."""
        tensor = torch.zeros(1000, device=opened.torch_device())
        for _ in range(10):
            tensor += 1
        opened.synchronize()
        assert tensor.eq(10).all().item()
