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

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hotswap.core._flat_config import build_from_flat
from hotswap.core.config import SECRET_SETTINGS, EngineConfig, ServerConfig
from hotswap.core.errors import UsageError
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.plugin_selection import COMMAND_LINE, CONFIG_FILE, Parsed, selections_from_settings

from .flags import (
    FLAG_ALIASES,
    auto_words,
    choices_of,
    flag_name,
    flat_fields,
    given_settings,
    greedy_flag,
    json_object,
    kind_of,
    number_from_text,
    refuse_later_value,
    spellings,
)
from .known_flags import KnownFlag, inverse, known_flag

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
    """Flags of `configs` that were given, and the file named by --config. Raises UsageError."""
    given: dict[str, Any] = {}
    for config in configs:
        given.update(given_settings(arguments, config))
    path = getattr(arguments, "config", None)
    settings = Settings(given, read_config_file(Path(path)) if path else {})
    flag = greedy_flag(arguments)
    if flag is not None and "model" not in {**settings.config_file, **given}:
        raise UsageError(f"{flag} took every value after it and no model is named: MODEL goes first, or after --model")
    return settings


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that a file can hold: its field and the section that it is part of."""

    name: str
    info: FieldInfo
    section: type[BaseModel]


def file_settings() -> dict[str, Setting]:
    """Every key that a config file may have, by field name; the other spellings of flags are keys too."""
    found: dict[str, Setting] = {}
    for config in (EngineConfig, ServerConfig):
        for name, info, section in flat_fields(config):
            found[name] = Setting(name, info, section)
            if name in FLAG_ALIASES:
                found[FLAG_ALIASES[name].removeprefix("--").replace("-", "_")] = found[name]
    return found


def read_config_file(path: Path) -> dict[str, Any]:
    """Settings by field name. Keys are flag names with or without dashes. Raises UsageError naming file and key."""
    known = file_settings()
    settings: dict[str, Any] = {}
    for key, value in _mapping_in(path).items():
        name = str(key).removeprefix("--").replace("-", "_")
        flag = known_flag(name) or known_flag(inverse(name) or "")
        setting = known.get(name) or known.get(inverse(name) or "")
        if setting is None and flag is not None:
            _check_known(path, flag, name, value)
            continue
        if setting is None:
            raise UsageError(f"--config {path}: {_unknown_key(str(key), known)}")
        if setting.name in settings:
            raise UsageError(f"--config {path}: {key!r} is given twice")
        if value is not None:  # a key without a value says nothing
            value = _file_value(setting, value, f"--config {path}: {key}")
            settings[setting.name] = not value if name == inverse(setting.name) else value
    return settings


def _mapping_in(path: Path) -> dict[Any, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: a mapping of settings is needed, got {type(content).__name__}")
    return content


def _check_known(path: Path, flag: KnownFlag, name: str, value: Any) -> None:
    if flag.switch and isinstance(value, bool) and name != flag.name:
        value = not value  # disable-lora: true
    try:
        flag.check(value)
    except UsageError as error:
        raise UsageError(f"--config {path}: {str(error).removeprefix('--')}") from None


def _unknown_key(key: str, known: Mapping[str, Setting]) -> str:
    from .foreign_flags import describe_foreign

    name = key.removeprefix("--").replace("-", "_")
    if name in EngineConfig.model_fields:
        return f"unknown setting {key!r}: settings are not grouped, write each at the top of the file"
    foreign = describe_foreign(flag_name(name))
    if foreign is not None:
        return f"unknown setting {key!r}: {foreign}"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0].replace('_', '-')!r}?" if near else ""
    return f"unknown setting {key!r}{hint}"


def _file_value(setting: Setting, value: Any, where: str) -> Any:
    """The value as the field takes it: what a flag takes as text may be text here too. Raises UsageError beginning with
    `where`."""
    kind = kind_of(setting.info)
    secret = setting.name in SECRET_SETTINGS
    shown = "" if secret else f", got {value!r:.60}"
    try:
        if kind is list and not isinstance(value, list | dict):
            value = [value]
        elif kind is dict and isinstance(value, str):
            value = json_object(value)
        elif kind in (int, float) and isinstance(value, bool):
            raise ValueError(value)
        elif kind in (int, float) and (isinstance(value, str) or str(value) in auto_words(setting.name, setting.info)):
            value = number_from_text(setting.name, setting.info, str(value))
        else:
            refuse_later_value(setting.name, value, [*choices_of(setting.info), *spellings(setting.info)])
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{where}: {error}") from None
    except ValueError:
        raise UsageError(f"{where}: {'a whole' if kind is int else 'a'} number is needed{shown}") from None
    if value is None:
        return None
    try:
        setting.section.model_validate({setting.name: value})
    except ValidationError as error:
        faults = [fault for fault in error.errors() if fault["loc"] and fault["loc"][0] == setting.name]
        if faults:  # others are about settings that are not in this file, and are found when all are put together
            quote = "; put it in quotes" if faults[0]["type"] == "string_type" else ""
            raise UsageError(f"{where}: {faults[0]['msg']}{shown}{quote}") from None
    return value


def builtin_plugins() -> tuple[str, ...]:
    """The tuple of built-in plugins. By name, because the server may know no plugin: it only passes the list on."""
    builtins: tuple[str, ...] = importlib.import_module("hotswap.plugins").BUILTIN_PLUGINS
    return builtins
