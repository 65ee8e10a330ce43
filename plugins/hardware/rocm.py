"""Platform `rocm`: one AMD card, through torch's HIP build, whose device is called "cuda" as well. Never run on an AMD card:
what chooses it is tested, what it does there is not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from pydantic import BaseModel

from hotswap.core.contracts import DeviceInfo
from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.platform import Platform, PlatformContext, PlatformProvider

from .accelerator.cards import facts, refusals
from .accelerator.kfd import ROOT, amd_host
from .accelerator.options import CardOptions, build_platform, chosen_card
from .accelerator.torch_build import reasons_against_rocm, torch_build, torch_folder


def device_facts(options: BaseModel | None) -> DeviceInfo:
    """What the kernel says of the chosen card. Raises PluginError when it is not there or cannot be used."""
    index = chosen_card(options)
    return facts(amd_host(ROOT, os.environ), "rocm", index)


def _unavailable(context: PlatformContext) -> list[str]:
    return [*refusals(amd_host(ROOT, os.environ)), *reasons_against_rocm(torch_build(torch_folder()))]


def _build(context: PlatformContext) -> Platform:
    return build_platform(context, device_facts(context.options))


@hookimpl
def hotswap_platform() -> Iterator[PlatformProvider]:
    yield PlatformProvider(
        name="rocm",
        build=_build,
        contract=2,
        options=CardOptions,
        unavailable=_unavailable,
        facts=device_facts,
        priority=20,
        summary="One AMD card, through torch's ROCm build; never run on one.",
    )
