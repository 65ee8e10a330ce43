"""Platforms with one fault each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

import torch

from ...contracts.platform import MemorySnapshot, Platform, PlatformProvider
from ...contracts.provider import DeviceInfo
from ..templates.platform import MyPlatform, MyPlatformOptions
from . import BrokenSample


class UnwrittenCache(MyPlatform):
    """Gives memory as it comes."""

    def empty_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, 0.5, dtype=dtype)


class OneCacheForAll(MyPlatform):
    """Hands the same memory out again and again."""

    _buffer = torch.zeros(1 << 12)

    def empty_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype is not torch.float32:
            return super().empty_kv_cache(shape, dtype)
        return self._buffer[: torch.Size(shape).numel()].zero_().view(shape)


class AlwaysFloat32(MyPlatform):
    """Does not look at the type asked for."""

    def empty_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape)


class WholeMachine(MyPlatform):
    """Takes all of the memory, as if nobody else lived here."""

    def memory(self) -> MemorySnapshot:
        memory = super().memory()
        return MemorySnapshot(memory.total_bytes, memory.total_bytes // 4)

    def kv_cache_bytes(self, gpu_memory_utilization: float, step_bytes: int = 0) -> int:
        return self.memory().total_bytes


class MemoryInGibibytes(MyPlatform):
    """Counts in another unit."""

    def memory(self) -> MemorySnapshot:
        memory = super().memory()
        return MemorySnapshot(memory.total_bytes >> 30, memory.available_bytes >> 30)


class FollowsTheCheckpoint(MyPlatform):
    """Computes in whatever the weights are stored in, whether that can be computed in or not."""

    def default_dtype(self, checkpoint_dtype: str) -> str:
        return checkpoint_dtype


class RestlessProbe(MyPlatform):
    """Another name at each look."""

    _looks = itertools.count()

    def probe(self) -> DeviceInfo:
        return DeviceInfo(kind="cpu", name=f"device {next(self._looks)}", memory_bytes=1 << 30)


def _sample(
    name: str,
    make: Callable[[MyPlatformOptions], Platform],
    caught_by: str,
    environment: object = None,
    facts: DeviceInfo | None = None,
) -> BrokenSample:
    provider = PlatformProvider(
        name=name,
        build=lambda context: make(MyPlatformOptions()),
        contract=2,
        environment=lambda: {} if environment is None else environment,  # type: ignore[arg-type, return-value]
        facts=None if facts is None else lambda options: facts,
        summary=f"broken: {name.replace('_', ' ')}",
    )
    return BrokenSample(name, provider, caught_by)


BROKEN: Final[tuple[BrokenSample, ...]] = (
    _sample("unwritten_cache", UnwrittenCache, "empty_kv_cache_is_zero"),
    _sample("always_float32", AlwaysFloat32, "empty_kv_cache_is_zero"),
    _sample("one_cache_for_all", OneCacheForAll, "caches_share_nothing"),
    _sample("whole_machine", WholeMachine, "kv_cache_fits_the_device"),
    _sample("memory_in_gibibytes", MemoryInGibibytes, "memory_adds_up"),
    _sample("follows_the_checkpoint", FollowsTheCheckpoint, "dtypes_are_names"),
    _sample("restless_probe", RestlessProbe, "probe_gives_plain_facts"),
    _sample("numbers_in_the_environment", MyPlatform, "environment_is_names_and_strings", {"OMP_NUM_THREADS": 2}),
    _sample(
        "facts_of_another_device",
        MyPlatform,
        "facts_are_what_probe_says",
        facts=DeviceInfo("cuda", "some card", (9, 0)),
    ),
)
