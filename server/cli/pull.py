"""`hotswap pull MODEL`: fetches a model as `serve` would, and says where it is."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hotswap.core.config import EngineConfig

from .flags import add_flags
from .main import configure_logging
from .progress import ProgressLine
from .settings import add_config_flag, read_settings

if TYPE_CHECKING:
    from hotswap.core.plugin_manager import PluginManager

_FIELDS = {
    *EngineConfig.model_fields["plugins"].annotation.model_fields,  # type: ignore[union-attr]  # a Section
    "model",
    "revision",
    "tokenizer",
    "load_format",
    "quantization",
    "trust_remote_code",
    "download_dir",
    "log_level",
}

_Listing = frozenset[tuple[str, int]]


def configure(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    add_flags(parser, EngineConfig, only=_FIELDS.__contains__)


def run(arguments: argparse.Namespace) -> int:
    """Raises HotswapError when the model cannot be had."""
    from hotswap.core.engine.assembly import resolve_model

    settings = read_settings(arguments, EngineConfig)
    config = settings.build(EngineConfig)
    configure_logging("warning" if "log_level" not in settings.command_line else config.log_level)
    manager = settings.manager()
    before = cached_paths(manager, config)
    with _progress() as report:
        resolved = resolve_model(manager, config, report)
    path = resolved.path
    model = config.model.model
    if before.get(path) == listing(path):
        what = f"{model} is there already"
    elif path == Path(model).expanduser().resolve():
        what = f"{model} is on this machine: nothing to fetch"
    else:
        what = f"{model}: fetched"
    print(f"hotswap: {what} ({readable(sum(size for _, size in listing(path)))}, {resolved.loader})", file=sys.stderr)
    print(path)
    return 0


def cached_paths(manager: PluginManager, config: EngineConfig) -> dict[Path, _Listing]:
    """What every cached model that is whole consists of, by its path."""
    from .list_models import cached_models

    return {model.path: listing(model.path) for model in cached_models(manager, config) if not model.damage}


def listing(path: Path) -> _Listing:
    """Names and sizes of a file, or of the files in a folder."""
    if path.is_file():
        return frozenset({(path.name, path.stat().st_size)})
    files = (file for file in path.rglob("*") if file.is_file())
    return frozenset((file.relative_to(path).as_posix(), file.stat().st_size) for file in files)


def readable(num_bytes: int) -> str:
    """98362432 -> '98.4 MB'"""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; one line a stage elsewhere. Reports may come from any thread."""
    if not sys.stderr.isatty():
        line = ProgressLine()
        yield line
        line.close()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done, total=total or None)

        yield report
