"""The logits processors that a request may name, and the check of what it says to them. No torch.

A front end checks before it sends, the engine again before it runs: a name is looked up among the processors that the
operator activated, and is never anything but a key (S-04).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ValidationError

from ..contracts.logits_processor import LogitsProcessorProvider
from ..errors import RequestError
from ..plugin_options import describe_fault, unknown_option

if TYPE_CHECKING:
    from ..plugin_manager import PluginManager

PARAM = "logits_processors"


class RequestProcessors:
    """arguments: by name, the model of what a request says to a processor."""

    def __init__(self, arguments: Mapping[str, type[BaseModel]] | None = None) -> None:
        self._arguments = dict(arguments or {})

    @classmethod
    def of(cls, manager: PluginManager) -> RequestProcessors:
        """Those among the operator's choices that take arguments. Raises PluginError."""
        found: dict[str, type[BaseModel]] = {}
        for registered in manager.named_providers("logits_processor"):
            model = cast(LogitsProcessorProvider, registered.provider).arguments
            if model is not None:
                found[registered.name] = model
        return cls(found)

    def check(self, asked: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The arguments by the model's own names with defaults filled, as plain values: what a processor is given. They
        are not to be checked again, as a model need not take what it gives: what travels is what was asked. Raises
        RequestError (400) naming what is wrong and what there is."""
        if not isinstance(asked, Mapping):
            raise RequestError(f'{PARAM} must be an object: {{"NAME": {{...arguments}}}}', param=PARAM)
        return {str(name): self._checked(name, given) for name, given in asked.items()}

    def _checked(self, name: Any, given: Any) -> dict[str, Any]:
        model = self._arguments.get(name) if isinstance(name, str) else None
        if model is None:
            allowed = ", ".join(sorted(self._arguments)) or "none"
            raise RequestError(
                f"{PARAM}: there is no active processor {str(name)!r:.80} that a request can name (allowed: {allowed})",
                param=PARAM,
            )
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise RequestError(f"{PARAM}: the arguments of {name!r} must be an object", param=PARAM)
        unknown = unknown_option(model, given)
        if unknown is not None:
            wrong, known = unknown
            raise RequestError(f"{PARAM}: {name!r} has no argument {wrong} (arguments: {known})", param=PARAM)
        try:
            checked = model.model_validate(dict(given))
            return checked.model_dump(mode="json")
        except ValidationError as error:
            faults = "; ".join(describe_fault(fault, model, "argument") for fault in error.errors(include_url=False))
            raise RequestError(f"{PARAM}: {name!r}: {faults}", param=PARAM) from error
        except Exception as error:  # a validator of the plugin's own may raise anything; it ends this request only
            raise RequestError(
                f"{PARAM}: {name!r} failed to check its arguments: {type(error).__name__}", param=PARAM, status=500
            ) from error
