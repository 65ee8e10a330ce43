"""Platform `cuda`: one NVIDIA card, through torch. This module and what it asks are cheap; torch comes with `build`."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

from pydantic import BaseModel

from hotswap.core.contracts import DeviceInfo
from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.platform import Platform, PlatformContext, PlatformProvider

from .accelerator.cards import Host, facts, refusals
from .accelerator.nvml import load_library, nvidia_host
from .accelerator.options import CardOptions, build_platform, chosen_card
from .accelerator.torch_build import reasons_against_cuda, torch_build, torch_folder

# Cards in the order in which the driver's own tools list them; the allocator maps pages into segments that grow, so that steps
# of changing sizes leave no gaps that nothing fits in; and cuBLAS gets a workspace of a fixed size, without which it may sum
# in another order from call to call.
ENVIRONMENT = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
_OLDER_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}


@functools.cache
def _host(visible: str | None) -> Host:
    """Asked once per value of CUDA_VISIBLE_DEVICES: cards neither come nor go while a process starts."""
    return nvidia_host(load_library(), {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


def host() -> Host:
    """The cards that this process may see."""
    return _host(os.environ.get("CUDA_VISIBLE_DEVICES"))


def environment() -> dict[str, str]:
    """What the operator has set, by this name or its older one, stays."""
    return {
        name: value
        for name, value in ENVIRONMENT.items()
        if not any(known in os.environ for known in (name, _OLDER_NAMES.get(name, name)))
    }


def device_facts(options: BaseModel | None) -> DeviceInfo:
    """What the driver says of the chosen card. Raises PluginError when it is not there or cannot be used."""
    return facts(host(), "cuda", chosen_card(options))


def _unavailable(context: PlatformContext) -> list[str]:
    found = host()
    return [*refusals(found), *reasons_against_cuda(torch_build(torch_folder()), found.driver_cuda)]


def _build(context: PlatformContext) -> Platform:
    return build_platform(context, device_facts(context.options))


@hookimpl
def hotswap_platform() -> Iterator[PlatformProvider]:
    yield PlatformProvider(
        name="cuda",
        build=_build,
        contract=2,
        options=CardOptions,
        unavailable=_unavailable,
        environment=environment,
        facts=device_facts,
        priority=20,
        summary="One NVIDIA card, compute capability 7.0 or newer.",
    )
