"""Kind `platform`: everything that differs between devices and is not a kernel. Engine process; made before torch is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..errors import PluginError
from .provider import BuildContext, DeviceInfo, Provider

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Bytes on the device, as this process may use them (on a CPU: within its cgroup)."""

    total_bytes: int
    available_bytes: int


class DeviceEvent(Protocol):
    """A point in the device's queue."""

    def record(self) -> None:
        """The point after everything that was asked of the device so far. May be called again."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has passed it. Lets other threads run meanwhile."""
        ...


class DeviceGraph(Protocol):
    """Device work that was recorded once and is repeated with one call."""

    def replay(self) -> None:
        """Queues the work again, over the same memory."""
        ...


class _Done:
    """The event of a device that has done everything when a call returns."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Platform(ABC):
    """One device family.

    is_asynchronous: work is queued, and calls return before it is done; then host tensors that are copied to or from the
        device must lie in memory of `pinned`.
    supports_graphs: `capture` works.
    lends_graph_results: `graph_result` gives up the memory of what it is given.
    """

    is_asynchronous: bool = False
    supports_graphs: bool = False
    lends_graph_results: bool = False

    @abstractmethod
    def probe(self) -> DeviceInfo:
        """Plain facts, without opening a context on the device."""

    @abstractmethod
    def initialize(self) -> None:
        """Opens the device for this process: thread counts, waiting policy, default device. Called once, before any tensor."""

    def enter_thread(self) -> None:
        """Called on every thread that will use the device, after `initialize` and before its first use there: the current
        device belongs to a thread."""

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
    def kv_cache_bytes(self, gpu_memory_utilization: float, step_bytes: int = 0) -> int:
        """How much memory the KV cache may take, measured after weights are loaded and when the operator gave no size.
        step_bytes: what the largest step takes besides (`peak_bytes`), graphs included."""

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Calls `run`, waits for it, and gives how much more memory than before was taken at its highest point. 0 where
        nothing counts it."""
        run()
        return 0

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory that the device can copy from and to while the host goes on. Asked of platforms that are
        asynchronous; raises PluginError where nothing is."""
        raise PluginError(f"{type(self).__name__} has no pinned memory")

    def event(self) -> DeviceEvent:
        """A new event of the queue that the engine works in."""
        return _Done()

    def capture(self, run: Callable[[], None]) -> DeviceGraph:
        """Records what `run` queues. All graphs of a platform share one memory pool: capture the largest first, and let no
        result of one be read after another has run. Raises PluginError where graphs are not supported."""
        raise PluginError(f"{type(self).__name__} cannot capture graphs")

    def graph_result(self, tensor: torch.Tensor) -> torch.Tensor:
        """For a tensor that the `run` of the last `capture` made: one over the same memory that does not hold it, so that later
        captures may use it for tensors of theirs. Each replay writes it; it may be read and written until another graph is
        replayed, while its own graph lives. The tensor itself where memory is not lent: each graph then keeps its results
        apart."""
        return tensor

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
    Called in the process that launches the engine; opens no device.

    facts: given the plugin's validated options, what `probe` will say; for `hotswap plugins`, which does not load torch. Opens
    no device; raises PluginError when the device that the options name cannot be used. None: the host's processors.
    """

    environment: Callable[[], dict[str, str]] = _no_environment
    facts: Callable[[BaseModel | None], DeviceInfo] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformContext(BuildContext):
    """Built before anything else is known; `device` holds a bare guess from the host."""
