"""A plugin's own options: from what the operator wrote to the plugin's pydantic model, with errors for the reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import AliasChoices, AliasPath, BaseModel, ValidationError

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
    unknown = unknown_option(model, options)
    if unknown is not None:
        wrong, known = unknown
        raise PluginError(f"{found.described} has no option {wrong} (options: {known}; {where})")
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        faults = "; ".join(describe_fault(fault, model) for fault in error.errors(include_url=False))
        raise PluginError(f"{found.described}: {faults} ({where})") from error
    except (Exception, SystemExit) as error:  # a validator of the plugin's own may raise anything; the plugin is named
        raise PluginError(
            f"{found.described} failed to check its options: {type(error).__name__}: {error} ({where})"
        ) from error


def unknown_option(model: type[BaseModel], given: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first name that the model does not know, with the nearest known one, and the list of all that it knows. Asked
    because a model that does not forbid extra fields would drop a misspelt one in silence."""
    if model.model_config.get("extra") == "allow":
        return None
    known = set(_option_names(model))
    for name in given:
        if name not in known:
            return f"{name!r:.80}{nearest(name, known)}", ", ".join(sorted(known)) or "none"
    return None


def _option_names(model: type[BaseModel]) -> Iterator[str]:
    by_name = model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name")
    for name, info in model.model_fields.items():
        spelled = info.validation_alias
        if spelled is None or by_name:
            yield name
        for choice in spelled.choices if isinstance(spelled, AliasChoices) else [spelled]:
            first = choice.path[0] if isinstance(choice, AliasPath) else choice
            if isinstance(first, str):
                yield first


def describe_fault(fault: Any, model: type[BaseModel], noun: str = "option") -> str:
    """One of pydantic's faults for the reader. noun: what the model's fields are called where they were given."""
    if not fault["loc"]:
        return str(fault["msg"])
    option = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        info = model.model_fields.get(str(fault["loc"][0]))
        about = f" ({info.description})" if info is not None and info.description else ""
        return f"{noun} {option!r} is required{about}"
    message = fault["msg"][:1].lower() + fault["msg"][1:]
    return f"{noun} {option!r}: {message.replace('input should', 'should')}, got {fault['input']!r:.60}"
