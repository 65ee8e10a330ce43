"""A platform that says it is a GPU and is the host: what is chosen for GPUs runs here, Triton under its interpreter.

    LLM(folder, plugins=["tests/support/interpreted_gpu.py"])

It has no graphs: a recording that Python ran again would ask the attention backend, which knows of the last step only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.platform import MemorySnapshot, Platform, PlatformContext, PlatformProvider
from hotswap.core.contracts.provider import DeviceInfo

if TYPE_CHECKING:
    import torch


class InterpretedGpu(Platform):
    def probe(self) -> DeviceInfo:
        return DeviceInfo(kind="cuda", name="Triton's interpreter", capability=(9, 0), memory_bytes=2**30)

    def initialize(self) -> None: ...

    def torch_device(self) -> str:
        return "cpu"

    def default_dtype(self, checkpoint_dtype: str) -> str:
        return checkpoint_dtype

    def memory(self) -> MemorySnapshot:
        return MemorySnapshot(2**30, 2**30)

    def kv_cache_bytes(self, gpu_memory_utilization: float, step_bytes: int = 0) -> int:
        return 2**24

    def synchronize(self) -> None: ...

    def empty_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(shape, dtype=dtype)


def _build(context: PlatformContext) -> Platform:
    return InterpretedGpu()


@hookimpl
def hotswap_platform() -> Iterator[PlatformProvider]:
    yield PlatformProvider(
        name="interpreted_gpu", build=_build, contract=2, priority=1, summary="The host, posing as a GPU."
    )
