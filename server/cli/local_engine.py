"""An engine process that belongs to one command, without HTTP."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from hotswap.core.config import EngineConfig

from .progress import ProgressLine
from .settings import Settings

if TYPE_CHECKING:
    from ..starting import StartableEngine


def quiet_config(settings: Settings) -> EngineConfig:
    """The engine's settings; its log lines are warnings only, unless a level was asked for. Raises UsageError."""
    config = settings.build(EngineConfig)
    if "log_level" in {**settings.config_file, **settings.command_line}:
        return config
    return config.model_copy(update={"log_level": "warning"})


@asynccontextmanager
async def local_engine(settings: Settings, config: EngineConfig) -> AsyncIterator[StartableEngine]:
    """Started on entry, shut down on exit. Progress and logs go to standard error. Raises HotswapError."""
    from ..starting import BackgroundStart
    from .serve import launch_engine

    logging.basicConfig(level=config.log_level.upper(), format="hotswap: %(levelname)s: %(message)s")
    progress = ProgressLine()
    start = BackgroundStart(lambda: launch_engine(config, settings.manager, progress))
    try:
        engine = await start.engine()
        await engine.start()
    except BaseException:
        start.abandon()
        raise
    finally:
        progress.close()
    try:
        yield engine
    finally:
        await engine.shutdown()
