"""The one selection rule, second half: from what the operator wrote and what is loaded to one provider, or a
refusal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from .contracts.kinds import KINDS, Kind
from .contracts.provider import BuildContext
from .errors import HotswapError, PluginError
from .plugin_discovery import root_cause, same_name
from .plugin_options import validated_options
from .plugin_registry import NotLoaded, ProviderRegistry, Registered, label
from .plugin_selection import AUTO, Selection, agree, nearest, strongest

logger = logging.getLogger("hotswap.plugins")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Registered):
    """What was chosen for a kind, with its validated options. why: for the reader, 'automatic: priority 10'."""

    options: BaseModel | None
    why: str


@dataclass(frozen=True, slots=True)
class Suits:
    """A condition of the automatic choice that only the caller can check. what: for messages, "architecture
    'FooForCausalLM'"."""

    what: str
    test: Callable[[Any], bool]  # of a Provider


class Chooser:
    """Applies the rule over the providers of a registry. `selections` is the manager's own list, complete once it has
    loaded."""

    def __init__(self, registry: ProviderRegistry, selections: list[Selection], strict: bool) -> None:
        self._registry = registry
        self._selections = selections
        self._strict = strict

    def explicit(self, kind: Kind, op: str | None) -> Selection | None:
        """The operator's choice. For one op of several, a choice for that op beats one for the kind."""
        applicable = [
            selection
            for selection in self._selections
            if selection.kind == kind.name
            and selection.op in (None, op)
            and (selection.op is not None or self._offers(kind, op, selection.name))
        ]
        found = strongest(applicable)
        return agree([selection for selection in found if selection.op] or found, label(kind.name, op))

    def _offers(self, kind: Kind, op: str | None, name: str) -> bool:
        """Whether a choice without an op is about this op: always for other kinds, whose names are checked later."""
        return (
            op is None
            or name in (AUTO, kind.fallback)
            or any(found.name == name for found in self._registry.providers(kind.name, op))
        )

    def named(
        self,
        kind: Kind,
        name: str,
        context: BuildContext,
        op: str | None,
        where: str,
        selection: Selection | None = None,
    ) -> Choice:
        found = self.find(kind, name, op, where)
        options = validated_options(found, selection.options if selection else {}, where)
        reasons = self.reasons_against(found, context)
        if reasons:
            raise PluginError(f"{found.described} ({where}) cannot run here: {'; '.join(reasons)}")
        return _choice(found, options, where)

    def find(self, kind: Kind, name: str, op: str | None, where: str) -> Registered:
        for found in self._registry.providers(kind.name, op):
            if found.name == name:
                return found
        for lost in self._registry.not_loaded:
            about_it = lost.kind in (None, kind.name) and same_name(name, lost.name or lost.origin.name)
            if about_it and lost.state == "blocked":
                raise PluginError(
                    f"{label(kind.name, op)} {name!r} ({where}) is blocked by {lost.cause}; "
                    f"drop the block, or name another one (installed: {self._names(kind, op)})"
                )
            if about_it:
                raise PluginError(f"{label(kind.name, op)} {name!r} ({where}): {failure(lost)}")
        near = nearest(name, {found.name for found in self._registry.providers(kind.name, op)})
        listed = "; ".join([f"installed: {self._names(kind, op)}", *self._absent(kind, whole_plugins_only=True)])
        raise PluginError(f"unknown {label(kind.name, op)} {name!r} ({where}){near} ({listed})")

    def _absent(self, kind: Kind, *, whole_plugins_only: bool = False) -> list[str]:
        """What might have offered this kind and is not there, for messages; each cause once."""
        phrases = []
        for lost in self._registry.not_loaded:
            if lost.kind is None:
                phrases.append(f"plugins blocked by {lost.cause}" if lost.state == "blocked" else lost.cause)
            elif lost.kind == kind.name and not whole_plugins_only:
                phrases.append(f"{lost.name} ({'blocked by ' if lost.state == 'blocked' else ''}{lost.cause})")
        return list(dict.fromkeys(phrases))

    def _names(self, kind: Kind, op: str | None) -> str:
        return ", ".join(sorted({found.name for found in self._registry.providers(kind.name, op)})) or "none"

    def automatic(self, kind: Kind, context: BuildContext, op: str | None, suits: Suits | None) -> Choice | None:
        """The highest priority with no reason against it; None when the core's fallback must serve."""
        against: list[str] = []
        able: list[Registered] = []
        for found in self._registry.providers(kind.name, op):
            reasons = self.automatic_reasons(found, context, suits)
            if reasons:
                against.append(f"{found.name} ({'; '.join(reasons)})")
            else:
                able.append(found)
        if not able:
            if kind.fallback is not None:
                return None
            raise PluginError(self._nothing_left(kind, op, suits, against))
        top = max(found.provider.priority for found in able)
        best = [found for found in able if found.provider.priority == top]
        if len(best) > 1:
            named = " and ".join(found.described for found in best)
            ways = " or ".join(f"--plugin {label(kind.name, op)}={found.name}" for found in best)
            raise PluginError(
                f"automatic choice of {label(kind.name, op)}: {named} have the same priority {top}; name one: {ways}"
            )
        return _choice(best[0], validated_options(best[0], {}, "automatic"), f"automatic: priority {top}")

    def automatic_reasons(self, found: Registered, context: BuildContext, suits: Suits | None = None) -> list[str]:
        """Why the automatic choice passes a provider over; empty when it is a candidate. One that fails to answer was
        not asked for: that is a warning, and an error only when `strict`."""
        if not found.builtin and not kind_row(found.kind).third_parties_automatic:
            return [f"{found.kind} plugins from outside are used only when named"]
        if not found.provider.automatic:
            return ["used only when named"]
        try:
            if suits is not None and not self._suits(found, suits):
                return [f"not for {suits.what}"]
            return self.reasons_against(found, context)
        except PluginError as error:
            if self._strict:
                raise
            logger.warning("%s; it is left out", error)
            self._registry.dismiss(found, str(error))
            return [str(error)]

    def _suits(self, found: Registered, suits: Suits) -> bool:
        try:
            return suits.test(found.provider)
        except HotswapError:
            raise
        except (Exception, SystemExit) as error:  # it may run the plugin's code; the plugin is named
            raise PluginError(f"{found.described} failed on {suits.what}: {root_cause(error)}") from error

    def _nothing_left(self, kind: Kind, op: str | None, suits: Suits | None, against: Sequence[str]) -> str:
        purpose = f" for {suits.what}" if suits else ""
        listed = "; ".join([*against, *self._absent(kind)]) or "none is installed"
        return f"no {label(kind.name, op)} plugin can serve{purpose}: {listed}"

    def reasons_against(self, found: Registered, context: BuildContext) -> list[str]:
        """Every reason why a provider cannot run in this context. Raises PluginError when the plugin fails to
        answer."""
        try:
            reasons = found.provider.unavailable(context)
        except (Exception, SystemExit) as error:  # third-party code may raise anything; the plugin is named
            logger.debug("%s: unavailable() raised", found.described, exc_info=True)
            raise PluginError(f"{found.described}: unavailable() failed: {root_cause(error)}") from error
        if isinstance(reasons, str) or not isinstance(reasons, Sequence):
            raise PluginError(f"{found.described}: unavailable() gave {type(reasons).__name__}, not a list of reasons")
        return [str(reason) for reason in reasons]


def kind_row(name: str) -> Kind:
    try:
        return KINDS[name]
    except KeyError:
        raise PluginError(f"unknown plugin kind {name!r}{nearest(name, KINDS)} (kinds: {', '.join(KINDS)})") from None


def fallback_words(kind: Kind) -> str:
    """What it means that no plugin was chosen for a kind with a fallback."""
    return f"no {kind.name} is active" if kind.fallback == "none" else f"the core's own {kind.fallback!r} serves"


def _choice(found: Registered, options: BaseModel | None, why: str) -> Choice:
    return Choice(kind=found.kind, provider=found.provider, origin=found.origin, options=options, why=why)


def failure(lost: NotLoaded) -> str:
    """One sentence that names the plugin once: the cause of a whole plugin's failure names it already."""
    return lost.cause if lost.kind is None else f"{lost.described}: {lost.cause}"
