"""What both platforms are told by `--plugin platform=NAME,device=N`, and what is built of it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts import DeviceInfo
from hotswap.core.contracts.platform import Platform, PlatformContext


class CardOptions(BaseModel):
    """Options of `--plugin platform=cuda` and `platform=rocm`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: int = Field(default=0, ge=0, description="Which card, counted from 0 among those that are visible.")


def chosen_card(options: BaseModel | None) -> int:
    """The card's place among the visible ones; the first when no options were given."""
    return options.device if isinstance(options, CardOptions) else 0


def build_platform(context: PlatformContext, info: DeviceInfo) -> Platform:
    """info: the facts of the chosen card. Imports torch."""
    from .platform import AcceleratorPlatform

    index = chosen_card(context.options)
    return AcceleratorPlatform(info, index, deterministic=context.config.deterministic, logger=context.logger)
