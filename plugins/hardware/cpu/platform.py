"""The CPU as a device."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

from hotswap.core.contracts.platform import MemorySnapshot, Platform
from hotswap.core.contracts.provider import DeviceInfo

from .host import cpu_features, cpu_model, host_memory
from .threads import default_threads

MAX_KV_CACHE_BYTES = 4 * 2**30
KV_CACHE_SHARE = (
    0.4  # of what is available: the rest belongs to activations, the page cache and whoever else lives here
)
_CACHE_LINE = 64


class CpuPlatform(Platform):
    """num_threads: threads of the forward; None for OMP_NUM_THREADS, else every usable core."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or default_threads()

    def probe(self) -> DeviceInfo:
        return DeviceInfo(
            kind="cpu",
            name=cpu_model(),
            memory_bytes=host_memory().total,
            count=self._num_threads,
            features=cpu_features(),
        )

    def initialize(self) -> None:
        """Sets torch's thread count. The waiting policy stands in the environment already (see `threads`)."""
        torch.set_num_threads(self._num_threads)

    def torch_device(self) -> str:
        return "cpu"

    def default_dtype(self, checkpoint_dtype: str) -> str:
        """bfloat16 and float32 stay as they are. float16 becomes float32: exact, where bfloat16 would drop three bits
        of each weight and processors have no fast float16 product; it takes twice the memory, and `--dtype bfloat16`
        undoes that. Weights in any other form (quantized) are computed in bfloat16."""
        return {"float32": "float32", "float16": "float32"}.get(checkpoint_dtype, "bfloat16")

    def activation_dtype(self, dtype: str) -> str:
        """float32 for bfloat16 weights: the kernels convert weights in registers and sum in float32 whatever comes in, so to
        round the activations in between would cost time and, measured on SmolLM2, six times the error in the logits."""
        return "float32" if dtype == "bfloat16" else dtype

    def memory(self) -> MemorySnapshot:
        memory = host_memory()
        return MemorySnapshot(memory.total, memory.available)

    def kv_cache_bytes(self, gpu_memory_utilization: float, step_bytes: int = 0) -> int:
        """The smaller of 4 GiB and 40 % of what is available; a CPU shares its memory, so the utilization is not
        asked."""
        return min(MAX_KV_CACHE_BYTES, int(host_memory().available * KV_CACHE_SHARE))

    def synchronize(self) -> None:
        """Nothing runs behind torch's back here."""

    def empty_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Anonymous memory: zero when first touched, and not taken from the host before. Huge pages where the kernel
        has them, as attention jumps from block to block."""
        num_elements = math.prod(shape)
        memory = mmap.mmap(-1, max(num_elements * dtype.itemsize, _CACHE_LINE))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages: ordinary ones do
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=dtype, count=num_elements).view(shape)
