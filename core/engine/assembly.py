"""Chooses and builds everything that an engine is made of, in the order in which one part needs another.

The API process uses `make_manager`, `resolve_model` and `open_checkpoints` (no torch); the engine process `assemble_engine`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..clock import Clock, SystemClock
from ..compatibility import refuse_incompatible
from ..config import EngineConfig
from ..contracts.kinds import KINDS
from ..contracts.loader import Checkpoint, Loader, LoaderContext
from ..contracts.platform import PlatformContext, PlatformProvider
from ..contracts.provider import DeviceInfo
from ..contracts.source import Source, SourceContext
from ..errors import ModelLoadError, UsageError
from ..plugin_manager import FrozenPlugins, PluginManager, Suits
from ..plugin_selection import AUTO, PYTHON, selections_from_settings

if TYPE_CHECKING:
    from .admin import EngineAdmin
    from .engine_core import EngineCore
    from .wire import EngineInfo

logger = logging.getLogger("hotswap.engine")

Report = Callable[[str, int, int], None]

FRONT_KINDS = ("loader", "source", "tool_parser")
_HOST = DeviceInfo(kind="host", name="host")  # for kinds that read files and never see a device


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine. tokenizer_*: only when the tokenizer comes from another folder."""

    path: Path
    loader: str
    tokenizer_path: Path | None = None
    tokenizer_loader: str | None = None


@dataclass(frozen=True, slots=True)
class OpenCheckpoints:
    """The model's checkpoint, and the tokenizer's if that is another one."""

    model: Checkpoint
    tokenizer: Checkpoint | None = None

    def close(self) -> None:
        self.model.close()
        if self.tokenizer is not None:
            self.tokenizer.close()


@dataclass(frozen=True, slots=True)
class AssembledEngine:
    """A running engine, its facts, and what can be asked of it while it runs."""

    core: EngineCore
    info: EngineInfo
    admin: EngineAdmin


def make_manager(config: EngineConfig, builtins: tuple[str, ...], source: str = PYTHON) -> PluginManager:
    """Loads the plugins that the settings ask for. Raises PluginError or UsageError in one line."""
    refuse_incompatible(config)
    settings = {**config.plugins.model_dump(), "load_format": None, "quantization": config.model.quantization}
    if config.model.load_format != "auto":
        settings["load_format"] = config.model.load_format
    manager = PluginManager(
        builtins=builtins, selections=selections_from_settings(settings, source), strict=config.plugins.strict_plugins
    )
    manager.load()
    refuse_combinations(manager, config)
    return manager


def refuse_combinations(manager: PluginManager, config: EngineConfig) -> None:
    """What the plugins forbid, as far as it can be told before a device is opened: of what the operator named, the policy
    and its victim rule. Raises UsageError or PluginError. The engine asks again when every choice is made."""
    plugins = {(kind, found.name) for kind in KINDS for found in manager.named(kind) if found.name != AUTO}
    context = _loader_context(config)
    for kind in ("policy", "victim"):
        choice = manager.preview(kind, context)
        if choice is not None:
            plugins.add((kind, choice.name))
    refuse_incompatible(config, plugins=plugins, more_rows=manager.rows())


def front_rows(manager: PluginManager, config: EngineConfig) -> list[dict[str, Any]]:
    """The inventory rows of kinds that are chosen in this process and not in the engine's."""
    rows = manager.inventory(_loader_context(config))
    return [msgspec.to_builtins(row) for row in rows if row.kind in FRONT_KINDS]


def freeze_manager(manager: PluginManager) -> bytes:
    """The manager as a message for another process."""
    return msgspec.msgpack.encode(manager.frozen())


def load_manager(frozen: bytes) -> PluginManager:
    """The same plugins in this process. Raises PluginError naming what cannot be loaded here."""
    return PluginManager.from_frozen(msgspec.msgpack.decode(frozen, type=FrozenPlugins))


def platform_environment(manager: PluginManager, config: EngineConfig) -> dict[str, str]:
    """Variables that the platform wants to stand before torch is loaded. Opens no device."""
    context = PlatformContext(options=None, config=config, device=_HOST, clock=SystemClock(), role="api")
    provider = cast(PlatformProvider, manager.choose("platform", context).provider)
    return provider.environment()


def cache_dir(config: EngineConfig) -> Path:
    """Where downloads and caches live; created private to the user."""
    path = Path(config.model.download_dir or "~/.cache/hotswap").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"the cache folder {path} cannot be made: {error.strerror}; give another --download-dir"
        ) from error
    return path


def resolve_model(manager: PluginManager, config: EngineConfig, report: Report | None) -> ResolvedModel:
    """Fetches the model if need be and finds its format. Raises UsageError or ModelLoadError."""
    path = _fetch(manager, config, config.model.model, config.model.revision, report)
    loader = _loader_for(manager, config, path, named=True)
    if config.model.tokenizer is None:
        return ResolvedModel(path, loader)
    # The revision is the model's own: another repository has other tags and commits.
    revision = config.model.revision if config.model.tokenizer == config.model.model else None
    tokenizer_path = _fetch(manager, config, config.model.tokenizer, revision, report)
    return ResolvedModel(path, loader, tokenizer_path, _loader_for(manager, config, tokenizer_path, named=False))


def _fetch(
    manager: PluginManager, config: EngineConfig, model: str, revision: str | None, report: Report | None
) -> Path:
    context = SourceContext(options=None, config=config, device=_HOST, clock=SystemClock(), cache_dir=cache_dir(config))
    suits = Suits(f"the model argument {model!r}", lambda provider: provider.build(context).accepts(model))
    source: Source = manager.build("source", context, suits=suits)
    return source.fetch(model, revision=revision, cache_dir=cache_dir(config), report=report)


def _loader_for(manager: PluginManager, config: EngineConfig, path: Path, *, named: bool) -> str:
    """The loader's name. named: whether --load-format applies (not to a tokenizer's folder)."""
    context = _loader_context(config)
    suits = Suits(str(path), lambda provider: provider.build(context).accepts(path))
    if named:
        return manager.choose("loader", context, suits=suits).name
    for found in manager.providers("loader"):
        if not manager.automatic_reasons(found, context, suits):
            return found.name
    raise ModelLoadError(f"no loader can read {path}")


def _loader_context(config: EngineConfig) -> LoaderContext:
    return LoaderContext(options=None, config=config, device=_HOST, clock=SystemClock(), cache_dir=cache_dir(config))


def open_checkpoint(manager: PluginManager, config: EngineConfig, path: Path, loader_name: str) -> Checkpoint:
    """Reads metadata only; refuses a checkpoint that needs code of its own unless that was allowed (S-08)."""
    loader: Loader = manager.build_named("loader", loader_name, _loader_context(config))
    return loader.open(path, trust_remote_code=config.model.trust_remote_code)


def open_checkpoints(manager: PluginManager, config: EngineConfig, resolved: ResolvedModel) -> OpenCheckpoints:
    model = open_checkpoint(manager, config, resolved.path, resolved.loader)
    if resolved.tokenizer_path is None or resolved.tokenizer_loader is None:
        return OpenCheckpoints(model)
    loader: Loader = manager.build_named("loader", resolved.tokenizer_loader, _loader_context(config))
    return OpenCheckpoints(model, loader.open_metadata(resolved.tokenizer_path))


def assemble_engine(
    manager: PluginManager, config: EngineConfig, model_path: str, loader: str, clock: Clock, report: Report | None
) -> AssembledEngine:
    """Builds the engine in this process: device, model, cache, scheduler. Torch is loaded here and not before.

    Raises PluginError, ModelLoadError or UsageError in one line.
    """
    begun = time.monotonic()
    from .builder import EngineBuilder

    started = time.monotonic()
    checkpoint = open_checkpoint(manager, config, Path(model_path), loader)
    try:
        builder = EngineBuilder(manager, config, checkpoint, clock, report)
        engine = builder.build()
    finally:
        checkpoint.close()
    seconds = engine.info.startup_seconds  # the builder's entries are parts of "engine"
    seconds.update(imports=round(started - begun, 3), engine=round(time.monotonic() - started, 3))
    logger.info("start-up in seconds: %s", ", ".join(f"{name} {value:.3f}" for name, value in seconds.items()))
    return engine
