"""`hotswap list`: the models on this machine that need no download, as every source knows them. Works offline."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hotswap.core.clock import SystemClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.contracts.source import CachedModel, Source, SourceContext

from .flags import add_flags
from .main import configure_logging
from .settings import add_config_flag, read_settings

if TYPE_CHECKING:
    from hotswap.core.plugin_manager import PluginManager

_FIELDS = {
    *EngineConfig.model_fields["plugins"].annotation.model_fields,  # type: ignore[union-attr]  # a Section
    "download_dir",
    "log_level",
}
_AGES = (("day", 86_400), ("hour", 3600), ("minute", 60))
logger = logging.getLogger("hotswap.list")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    add_config_flag(parser)
    add_flags(parser, EngineConfig, only=_FIELDS.__contains__)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments, EngineConfig)
    config = settings.build(EngineConfig)
    configure_logging("warning" if "log_level" not in settings.command_line else config.log_level)
    models = cached_models(settings.manager(), config)
    if arguments.json:
        print(json.dumps([_as_json(model) for model in models], indent=2))
    elif models:
        _print_table(models, time.time())
    else:
        print("hotswap: no models are cached; `hotswap pull MODEL` fetches one", file=sys.stderr)
    return 0


def cached_models(manager: PluginManager, config: EngineConfig) -> list[CachedModel]:
    """What the sources have, in order of their names. A source that fails is a warning naming it, and the others count."""
    from hotswap.core.engine.assembly import cache_dir

    folder = cache_dir(config)
    device = DeviceInfo(kind="host", name="host")
    context = SourceContext(options=None, config=config, device=device, clock=SystemClock(), cache_dir=folder)
    found: list[CachedModel] = []
    for registered in manager.providers("source"):
        try:
            source: Source = registered.provider.build(context)
            found.extend(source.cached(folder))
        except Exception as error:  # noqa: BLE001 - a listing of many places is worth having without one of them
            logger.warning(
                "%s cannot say what it has cached: %s: %s", registered.described, type(error).__name__, error
            )
    return sorted(found, key=lambda model: (model.name, model.revision or ""))


def serve_words(model: CachedModel) -> str:
    """What to write after `hotswap serve`."""
    return model.name if model.revision is None else f"{model.name} --revision {model.revision}"


def _as_json(model: CachedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "revision": model.revision,
        "serve": serve_words(model),
        "path": str(model.path),
        "bytes": model.num_bytes,
        "format": model.format or None,
        "used_at": model.used_at or None,
        "damage": model.damage or None,
    }


def _print_table(models: Sequence[CachedModel], now: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from .pull import readable

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "size", "format", "used", "state"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for model in models:
        used = age(now - model.used_at) if model.used_at else "unknown"
        state = "damaged" if model.damage else "whole"
        style = "red" if model.damage else ""
        table.add_row(serve_words(model), readable(model.num_bytes), model.format or "?", used, state, style=style)
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for model in models:
        if model.damage:
            again = f"`hotswap pull {serve_words(model)}` fetches it again"
            console.print(f"{serve_words(model)}: damaged: {model.damage}; {again} ({model.path})", soft_wrap=True)


def age(seconds: float) -> str:
    """'3 days ago'; 'just now' within a minute."""
    for unit, length in _AGES:
        count = int(seconds // length)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
