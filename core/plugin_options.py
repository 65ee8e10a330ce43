"""A plugin's own options: from what the operator wrote to the plugin's pydantic model, with errors for the reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from .errors import PluginError
from .plugin_registry import Registered
from .plugin_selection import nearest


def validated_options(found: Registered, options: Mapping[str, Any], where: str) -> BaseModel | None:
    """The options object for `build`. Raises PluginError saying which option, which value and what is allowed."""
    model = found.provider.options
    if model is None:
        if options:
            raise PluginError(f"{found.described} takes no options, got {', '.join(sorted(options))} ({where})")
        return None
    # Checked here because a model that does not forbid extra fields would drop a misspelt option in silence.
    if model.model_config.get("extra") != "allow":
        known = set(_option_names(model))
        for name in options:
            if name not in known:
                listed = ", ".join(sorted(known)) or "none"
                raise PluginError(
                    f"{found.described} has no option {name!r}{nearest(name, known)} (options: {listed}; {where})"
                )
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        faults = "; ".join(_describe(fault, model) for fault in error.errors(include_url=False))
        raise PluginError(f"{found.described}: {faults} ({where})") from error
    except Exception as error:  # a validator of the plugin's own may raise anything; the plugin is named
        raise PluginError(
            f"{found.described} failed to check its options: {type(error).__name__}: {error} ({where})"
        ) from error


def _option_names(model: type[BaseModel]) -> Iterator[str]:
    by_name = model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name")
    for name, info in model.model_fields.items():
        if info.alias is None or by_name:
            yield name
        if info.alias is not None:
            yield info.alias


def _describe(fault: Any, model: type[BaseModel]) -> str:
    if not fault["loc"]:
        return str(fault["msg"])
    option = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        info = model.model_fields.get(str(fault["loc"][0]))
        about = f" ({info.description})" if info is not None and info.description else ""
        return f"option {option!r} is required{about}"
    message = fault["msg"][:1].lower() + fault["msg"][1:]
    return f"option {option!r}: {message.replace('input should', 'should')}, got {fault['input']!r:.60}"
