"""A card that torch drives as "cuda": NVIDIA's, and AMD's through HIP."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hotswap.core.contracts import DeviceInfo, MemorySnapshot, Platform, PluginError
from hotswap.core.contracts.platform import DeviceEvent, DeviceGraph

from .budget import CardMemory, kv_cache_budget


class AcceleratorPlatform(Platform):
    """One card and torch's default stream on it; graphs are captured on a stream beside it and replayed in it.

    info: what the driver said. index: the card's place among the visible ones. deterministic: no sums in less than float32
    inside matrix products, as those depend on how a product is cut.

    A thread that waits for the card spins (CUDA's own choice while there are processors enough) and has released the GIL: to
    sleep instead costs tens of microseconds a step.
    """

    is_asynchronous = True
    supports_graphs = True
    # By a private function of torch; without it graphs keep their results, and the budget counts them.
    lends_graph_results = hasattr(torch._C, "_construct_storage_from_data_pointer")

    def __init__(self, info: DeviceInfo, index: int, *, deterministic: bool, logger: logging.Logger) -> None:
        self._info = info
        self._index = index
        self._deterministic = deterministic
        self._logger = logger
        self._graph_pool: Any = None  # torch's opaque handle
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # those of the pool that are alive
        self._capture_stream: torch.cuda.Stream | None = None

    def probe(self) -> DeviceInfo:
        return self._info

    def initialize(self) -> None:
        """Opens the context and runs one kernel. Raises PluginError when torch cannot, or when torch's card is another than the
        driver's."""
        try:
            self.enter_thread()
            torch.zeros(1, device=self.torch_device())  # a torch without code for this card fails here
            torch.cuda.synchronize(self._index)
        except (RuntimeError, AssertionError) as error:  # torch raises either
            raise PluginError(f"{self._info.name} cannot be opened: {_first_line(error)}") from error
        self._check_identity()
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        if self._deterministic:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._index)

    def _check_identity(self) -> None:
        """Driver and torch may count different cards differently."""
        if self._info.kind == "rocm":
            name = str(torch.cuda.get_device_properties(self._index).gcnArchName).partition(":")[0]
            same = name in self._info.features
        else:
            name = "compute capability {}.{}".format(*torch.cuda.get_device_capability(self._index))
            same = torch.cuda.get_device_capability(self._index) == self._info.capability
        if not same:
            raise PluginError(
                f"device {self._index}: the driver says {self._info.name}, torch {name}: they count the cards in different "
                "orders. Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or hide all cards but one (CUDA_VISIBLE_DEVICES)"
            )

    def torch_device(self) -> str:
        return f"cuda:{self._index}"

    def default_dtype(self, checkpoint_dtype: str) -> str:
        """The checkpoint's own where the card computes in it. Weights in any other form (quantized) are computed in bfloat16,
        and all that would be bfloat16 in float16 on a card without it."""
        if checkpoint_dtype in ("float32", "float16"):
            return checkpoint_dtype
        if "bf16" in self._info.features:
            return "bfloat16"
        self._logger.warning(
            "%s has no bfloat16: float16 instead, which ends at 65504; --dtype float32 is exact", self._info.name
        )
        return "float16"

    def memory(self) -> MemorySnapshot:
        free, total = torch.cuda.mem_get_info(self._index)
        return MemorySnapshot(total, free)

    def kv_cache_bytes(self, gpu_memory_utilization: float, step_bytes: int = 0) -> int:
        """What the utilization grants, less what anyone uses now, the largest step, and a reserve of 256 MiB."""
        self.synchronize()
        torch.cuda.empty_cache()  # what torch keeps for later is not in use
        free, total = torch.cuda.mem_get_info(self._index)
        memory = CardMemory(total, free, torch.cuda.memory_allocated(self._index))
        return kv_cache_budget(memory, gpu_memory_utilization, step_bytes, self._info.kind)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Tensors only; what the driver takes besides, such as code, stays taken and is seen by `kv_cache_bytes`. What torch
        keeps afterwards is given back."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self._index)
        before = torch.cuda.memory_allocated(self._index)
        run()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self._index) - before
        torch.cuda.empty_cache()
        return peak

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def event(self) -> DeviceEvent:
        return torch.cuda.Event(enable_timing=False, blocking=False)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> DeviceGraph:
        """`run` must have run before, outside a capture: kernels are compiled and workspaces made then.

        torch's own context manager empties the allocator's cache for each graph; a ladder of them is to be captured in seconds.
        Raises PluginError when `run` does what cannot be recorded.
        """
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        if not self._graphs:  # a pool ends with its last graph, and torch does not open it again
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        collects = gc.isenabled()
        gc.disable()  # to free a device object in the middle of a capture may break it
        try:
            with torch.cuda.stream(self._capture_stream):
                graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
                try:
                    run()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # the capture is broken; what broke it says more
                        graph.capture_end()
                    raise
                graph.capture_end()
        except torch.OutOfMemoryError:
            raise  # the caller knows which part it was
        except RuntimeError as error:
            raise PluginError(
                f"a step cannot be recorded as a graph: {_first_line(error)}; --enforce-eager serves without graphs"
            ) from error
        finally:
            if collects:
                gc.enable()
        self._graphs.add(graph)
        return graph

    def graph_result(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is freed in a graph's pool stays there: torch gives a pool's memory to captures only, and to the driver when no
        graph of the pool is left. Its own graph trees look at results in this way, too."""
        if not self.lends_graph_results:
            return tensor
        storage = tensor.untyped_storage()
        borrowed = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)

    def empty_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch_device())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
