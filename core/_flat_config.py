"""Flat settings (flags, keyword arguments) into the sections of EngineConfig, with errors for the reader."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .config import SECRET_SETTINGS
from .errors import UsageError

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def field_owners(config: type[BaseModel]) -> dict[str, str | None]:
    """Flat field name -> the section that holds it (None: the config itself). Names are unique over sections."""
    owners: dict[str, str | None] = {}
    for name, info in config.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            for inner in section.model_fields:
                owners[inner] = name
        else:
            owners[name] = None
    return owners


def build_from_flat(config: type[ConfigT], settings: dict[str, Any], *, spell: Callable[[str], str] = str) -> ConfigT:
    """Raises UsageError, naming the setting and the nearest known one. spell: how the reader wrote a setting's name."""
    owners = field_owners(config)
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in owners:
            near = difflib.get_close_matches(name, owners, n=1)
            hint = f"; did you mean {spell(near[0])!r}?" if near else ""
            raise UsageError(f"unknown setting {spell(name)!r}{hint}")
        owner = owners[name]
        if owner is None:
            nested[name] = value
        else:
            nested.setdefault(owner, {})[name] = value
    try:
        return config.model_validate(nested)
    except ValidationError as error:
        raise UsageError("; ".join(describe_validation_error(error, spell))) from None


def describe_validation_error(error: ValidationError, spell: Callable[[str], str] = str) -> list[str]:
    """One sentence per fault, without echoing large inputs."""
    sentences = []
    for fault in error.errors():
        names = [part for part in fault["loc"] if isinstance(part, str)]  # numbers are places in a list
        name = spell(names[-1]) if names else "value"
        got = "" if SECRET_SETTINGS.intersection(names) else f", got {fault['input']!r:.60}"
        sentences.append(f"{name}: {fault['msg']}{got}")
    return sentences
