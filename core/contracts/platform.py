"""Kind `platform`: everything that differs between devices and is not a kernel. Engine process; made before torch is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .provider import BuildContext, DeviceInfo, Provider

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Bytes on the device, as this process may use them (on a CPU: within its cgroup)."""

    total_bytes: int
    available_bytes: int


class Platform(ABC):
    """One device family."""

    @abstractmethod
    def probe(self) -> DeviceInfo:
        """Plain facts, without opening a context on the device."""

    @abstractmethod
    def initialize(self) -> None:
        """Opens the device for this process: thread counts, waiting policy, default device. Called once, before any tensor."""

    @abstractmethod
    def torch_device(self) -> str:
        """The device string for new tensors."""

    @abstractmethod
    def default_dtype(self, checkpoint_dtype: str) -> str:
        """The dtype name that `--dtype auto` means here for a checkpoint stored in `checkpoint_dtype`."""

    def activation_dtype(self, dtype: str) -> str:
        """The dtype name of activations for weights in `dtype`: the same, unless the device computes in a wider one anyway."""
        return dtype

    @abstractmethod
    def memory(self) -> MemorySnapshot:
        """Now."""

    @abstractmethod
    def kv_cache_bytes(self, gpu_memory_utilization: float) -> int:
        """How much memory the KV cache may take, measured after weights are loaded and when the operator gave no size."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the device has done what was asked of it."""

    @abstractmethod
    def empty_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory for one cache tensor; pages may be touched lazily."""


def _no_environment() -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformProvider(Provider[Platform]):
    """environment: variables that must stand in the engine process before torch is loaded (thread counts, waiting policy).
    Called in the process that launches the engine; opens no device."""

    environment: Callable[[], dict[str, str]] = _no_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformContext(BuildContext):
    """Built before anything else is known; `device` holds a bare guess from the host."""
