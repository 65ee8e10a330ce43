"""Platform `cpu`: any machine that torch runs on, its cores and memory as this process's cgroup grants them."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.platform import Platform, PlatformContext, PlatformProvider

from .threads import thread_environment


class CpuOptions(BaseModel):
    """Options of `--plugin platform=cpu`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_threads: int | None = Field(
        default=None, ge=1, description="Threads of the forward; the usable cores when not given."
    )


def _build(context: PlatformContext) -> Platform:
    from .platform import CpuPlatform

    options = context.options if isinstance(context.options, CpuOptions) else CpuOptions()
    return CpuPlatform(options.num_threads)


@hookimpl
def hotswap_platform() -> Iterator[PlatformProvider]:
    yield PlatformProvider(
        name="cpu",
        build=_build,
        contract=2,
        options=CpuOptions,
        environment=thread_environment,
        summary="The host's processors; cores and memory as the cgroup grants them.",
    )
