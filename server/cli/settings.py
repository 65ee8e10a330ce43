"""What a command was told: flags, then the config file, then defaults; and the plugin choices of each, by their
source."""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from hotswap.core._flat_config import build_from_flat
from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.core.errors import UsageError
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.plugin_selection import COMMAND_LINE, CONFIG_FILE, Parsed, selections_from_settings

from .flags import flag_name, flat_fields, given_settings, takes_auto

ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Settings:
    """Flat settings by source. A flag beats the file; `plugin` lists of both count, each as its own source."""

    command_line: Mapping[str, Any]
    config_file: Mapping[str, Any] = field(default_factory=dict)

    def build(self, config: type[ConfigT]) -> ConfigT:
        """The config out of the settings that are its own. Raises UsageError naming the flag."""
        own = {name for name, _, _ in flat_fields(config)}
        merged = {**self.config_file, **self.command_line}
        if "plugin" in own:
            merged["plugin"] = [*self.config_file.get("plugin", []), *self.command_line.get("plugin", [])]
        return build_from_flat(config, {name: value for name, value in merged.items() if name in own}, spell=flag_name)

    def selections(self) -> list[Parsed]:
        """The plugin choices, each with its source. Raises PluginError on a value that cannot be parsed."""
        return [
            *selections_from_settings(self.command_line, COMMAND_LINE),
            *selections_from_settings(self.config_file, CONFIG_FILE),
        ]

    def manager(self, *, tolerate_conflicts: bool = False) -> PluginManager:
        """The plugin manager for these settings, loaded. Raises PluginError with one line for each refusal."""
        manager = PluginManager(
            builtins=builtin_plugins(),
            selections=self.selections(),
            strict=self.build(EngineConfig).plugins.strict_plugins,
        )
        manager.load(tolerate_conflicts=tolerate_conflicts)
        return manager


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings by flag name; flags beat it.")


def read_settings(arguments: argparse.Namespace, *configs: type[BaseModel]) -> Settings:
    """Flags of `configs` that were given, and the file named by --config."""
    given: dict[str, Any] = {}
    for config in configs:
        given.update(given_settings(arguments, config))
    path = getattr(arguments, "config", None)
    return Settings(given, read_config_file(Path(path)) if path else {})


def read_config_file(path: Path) -> dict[str, Any]:
    """Settings by field name. Keys are flag names with or without dashes. Raises UsageError naming file and key."""
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: a mapping of settings is needed, got {type(content).__name__}")
    known = {name: info for config in (EngineConfig, ServerConfig) for name, info, _ in flat_fields(config)}
    settings: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0].replace('_', '-')!r}?" if near else ""
            raise UsageError(f"--config {path}: unknown setting {key!r}{hint}")
        if name in settings:
            raise UsageError(f"--config {path}: {key!r} is given twice")
        settings[name] = None if value == "auto" and takes_auto(known[name]) else value
    plugins = settings.get("plugin", [])
    if not isinstance(plugins, list) or not all(isinstance(item, str) for item in plugins):
        raise UsageError(f"--config {path}: plugin is a list of values such as policy=fcfs")
    return settings


def builtin_plugins() -> tuple[str, ...]:
    """The tuple of built-in plugins. By name, because the server may know no plugin: it only passes the list on."""
    builtins: tuple[str, ...] = importlib.import_module("hotswap.plugins").BUILTIN_PLUGINS
    return builtins
