"""Platform `my_platform`: the host's processors, with a fixed share of the free memory for the KV cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts import DeviceInfo, MemorySnapshot, Platform, PlatformContext, PlatformProvider, hookimpl

if TYPE_CHECKING:
    import torch


class MyPlatformOptions(BaseModel):
    """What may follow `--plugin platform=my_platform,`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_cache_share: float = Field(default=0.25, gt=0, le=0.9, description="Share of the free memory for the KV cache.")


class MyPlatform(Platform):
    """torch is imported in the methods that need it: the hook must stay cheap."""

    def __init__(self, options: MyPlatformOptions) -> None:
        self._options = options

    def probe(self) -> DeviceInfo:
        return DeviceInfo(
            kind="cpu", name="host processors", memory_bytes=self.memory().total_bytes, count=os.cpu_count() or 1
        )

    def initialize(self) -> None:
        import torch

        torch.set_num_threads(os.cpu_count() or 1)

    def torch_device(self) -> str:
        return "cpu"

    def default_dtype(self, checkpoint_dtype: str) -> str:
        return "float32" if checkpoint_dtype == "float32" else "bfloat16"

    def memory(self) -> MemorySnapshot:
        page = os.sysconf("SC_PAGE_SIZE")
        return MemorySnapshot(page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES"))

    def kv_cache_bytes(self, gpu_memory_utilization: float, step_bytes: int = 0) -> int:
        return int(self.memory().available_bytes * self._options.kv_cache_share)

    def synchronize(self) -> None:
        """Nothing runs behind torch's back on a processor."""

    def empty_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(shape, dtype=dtype)


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}


def _build(context: PlatformContext) -> MyPlatform:
    return MyPlatform(context.options if isinstance(context.options, MyPlatformOptions) else MyPlatformOptions())


@hookimpl
def hotswap_platform() -> Iterator[PlatformProvider]:
    # Plugins from outside take part in the automatic choice of a platform: below the built-in `cpu`, so that it is
    # used when somebody names it.
    yield PlatformProvider(
        name="my_platform",
        build=_build,
        contract=2,
        options=MyPlatformOptions,
        environment=_environment,
        priority=-10,
        summary="the host's processors, with a fixed share of memory for the KV cache",
    )
