"""Flat settings (flags, keyword arguments) into the sections of EngineConfig, with errors for the reader."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

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


def build_from_flat(config: type[ConfigT], settings: dict[str, Any]) -> ConfigT:
    """Raises UsageError, naming the setting and the nearest known one."""
    owners = field_owners(config)
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in owners:
            near = difflib.get_close_matches(name, owners, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"unknown setting {name!r}{hint}")
        owner = owners[name]
        if owner is None:
            nested[name] = value
        else:
            nested.setdefault(owner, {})[name] = value
    try:
        return config.model_validate(nested)
    except ValidationError as error:
        raise UsageError("; ".join(describe_validation_error(error))) from None


def describe_validation_error(error: ValidationError) -> list[str]:
    """One sentence per fault, without echoing large inputs."""
    sentences = []
    for fault in error.errors():
        name = str(fault["loc"][-1]) if fault["loc"] else "value"
        sentences.append(f"{name}: {fault['msg']}, got {fault['input']!r:.60}")
    return sentences
