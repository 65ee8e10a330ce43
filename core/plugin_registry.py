"""What the loaded plugins offer: hooks called one by one, providers checked, conflicts and failures remembered with
their owner."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pluggy
from pydantic import BaseModel

from . import hookspecs
from .contracts.hooks import HOOK_PROJECT
from .contracts.kinds import KINDS, Kind
from .contracts.provider import CompatibilityRow, Provider
from .errors import PluginError
from .plugin_discovery import Origin, load, normalized, root_cause, same_name
from .plugin_selection import AUTO, Block, nearest

logger = logging.getLogger("hotswap.plugins")

_VALID_NAME: Final = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A provider and whose it is."""

    kind: str
    provider: Provider[Any]
    origin: Origin

    @property
    def name(self) -> str:
        return self.provider.name

    @property
    def op(self) -> str | None:
        return getattr(self.provider, "op", None)

    @property
    def distribution(self) -> str:
        return self.origin.distribution

    @property
    def version(self) -> str:
        return self.origin.version

    @property
    def module(self) -> str:
        return self.origin.target

    @property
    def builtin(self) -> bool:
        return self.origin.builtin

    @property
    def described(self) -> str:
        """For messages: "policy 'fair' of hotswap-fair 1.2.0"."""
        return f"{label(self.kind, self.op)} {self.name!r} of {self.origin.owner}"


class NotLoaded(msgspec.Struct, frozen=True):
    """A plugin (kind None), or one provider of it, that is not there. state: "failed" or "blocked"; cause in one
    line."""

    origin: Origin
    state: str
    cause: str
    kind: str | None = None
    name: str = ""
    contract: int | None = None

    @property
    def described(self) -> str:
        return f"{self.kind} {self.name!r} of {self.origin.owner}" if self.kind else self.origin.described


@dataclass(frozen=True, slots=True)
class Conflict:
    """Several providers of one name where one is allowed. message: for the reader, with the way out."""

    claimants: tuple[Registered, ...]
    message: str


def label(kind: str, op: str | None) -> str:
    return f"{kind}.{op}" if op else kind


class ProviderRegistry:
    """Loads plugins and holds their providers. Not thread-safe: filled at start-up."""

    def __init__(self, blocks: Sequence[Block] = ()) -> None:
        self.blocks = list(blocks)
        self.used_blocks: set[Block] = set()
        self.loaded: list[Origin] = []
        self.not_loaded: list[NotLoaded] = []
        self._providers: dict[str, list[Registered]] = {kind: [] for kind in KINDS}
        self._hooks = pluggy.PluginManager(HOOK_PROJECT)
        self._hooks.add_hookspecs(hookspecs)

    def providers(self, kind: str, op: str | None = None) -> list[Registered]:
        """What can be chosen, in the order of registration; with `op`, those of that op."""
        return [found for found in self._providers[kind] if op is None or found.op == op]

    def load(self, origin: Origin) -> list[Registered]:
        """Imports one plugin and registers what it provides. Raises PluginError with the cause; nothing of it is kept
        then."""
        try:
            plugin = load(origin)
        except (Exception, SystemExit) as error:  # a plugin's import may raise anything; the cause is reported by name
            logger.debug("%s failed to import", origin.described, exc_info=True)
            raise PluginError(f"{origin.described} failed to import: {root_cause(error)}") from error
        if self._hooks.is_registered(plugin):
            return [found for kind in KINDS for found in self._providers[kind] if self._plugin_of(found) is plugin]
        self._register_hooks(origin, plugin)
        try:
            offered = [
                (kind, provider)
                for kind in KINDS.values()
                for implementation in self._implementations(plugin, kind)
                for provider in _call_hook(implementation, kind, origin)
            ]
        except PluginError:
            self._hooks.unregister(plugin)
            raise
        self.loaded.append(origin)
        return [found for kind, provider in offered if (found := self._add(kind, provider, origin))]

    def try_load(self, origin: Origin) -> None:
        """`load` for a plugin that nobody asked for: a block keeps it out unseen, a failure is remembered."""
        block = self.blocking(origin)
        if block:
            self.not_loaded.append(NotLoaded(origin, "blocked", f"{block.spelled} ({block.source})"))
            return
        try:
            self.load(origin)
        except PluginError as error:
            self.not_loaded.append(NotLoaded(origin, "failed", str(error)))

    def dismiss(self, found: Registered, cause: str) -> None:
        """Takes a provider out that failed while it was being considered."""
        self._providers[found.kind].remove(found)
        self.not_loaded.append(
            NotLoaded(found.origin, "failed", cause, found.kind, found.name, found.provider.contract)
        )

    def blocking(self, origin: Origin, kind: str | None = None, name: str | None = None) -> Block | None:
        """The block that keeps a plugin out (no `kind`), or one provider of it."""
        for block in self.blocks:
            if kind is None:
                hit = block.kind is None and (
                    same_name(block.name, origin.distribution) or same_name(block.name, origin.name)
                )
                hit = hit and not (origin.builtin and not same_name(block.name, origin.distribution))
            else:
                hit = block.name == name and block.kind in (None, kind)
            if hit:
                self.used_blocks.add(block)
                return block
        return None

    def conflicts(self) -> list[Conflict]:
        """One for each name that two plugins claim within a kind (and op)."""
        claims: dict[tuple[str, str | None, str], list[Registered]] = {}
        for kind, registered in self._providers.items():
            for found in registered:
                claims.setdefault((kind, found.op, found.name), []).append(found)
        return [
            Conflict(tuple(claimants), _describe_conflict(claimants))
            for claimants in claims.values()
            if len(claimants) > 1
        ]

    def _register_hooks(self, origin: Origin, plugin: object) -> None:
        if isinstance(plugin, type):
            raise PluginError(
                f"{origin.described} is the class {plugin.__name__}, not an instance or a module: point to one"
            )
        try:
            self._hooks.register(plugin, name=f"{origin.how}:{origin.target}")
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"{origin.described} has an invalid hook: {' '.join(str(error).split())}") from error
        problem = self._hook_problem(plugin)
        if problem:
            self._hooks.unregister(plugin)
            raise PluginError(f"{origin.described} {problem}")

    def _hook_problem(self, plugin: object) -> str | None:
        callers = self._hooks.get_hookcallers(plugin) or []
        if not callers:
            return "implements no hook: mark a function hotswap_KIND with @hookimpl"
        for caller in callers:
            mine = [implementation for implementation in caller.get_hookimpls() if implementation.plugin is plugin]
            if not caller.has_spec() and not all(implementation.optionalhook for implementation in mine):
                return f"implements an unknown hook {caller.name!r}{nearest(caller.name, hookspecs.hook_names())}"
            if any(implementation.wrapper or implementation.hookwrapper for implementation in mine):
                return f"wraps {caller.name!r}: hooks of hotswap cannot be wrapped"
        return None

    def _implementations(self, plugin: object, kind: Kind) -> list[Callable[[], Any]]:
        caller = getattr(self._hooks.hook, kind.hook)
        return [found.function for found in caller.get_hookimpls() if found.plugin is plugin]

    def _plugin_of(self, found: Registered) -> object:
        return self._hooks.get_plugin(f"{found.origin.how}:{found.origin.target}")

    def _add(self, kind: Kind, provider: Provider[Any], origin: Origin) -> Registered | None:
        """Takes one provider, unless it is blocked or was written for a contract that the core does not support."""
        cause, state = contract_problem(kind, provider), "failed"
        block = self.blocking(origin, kind.name, provider.name)
        if block:
            cause, state = f"{block.spelled} ({block.source})", "blocked"
        if cause:
            self.not_loaded.append(NotLoaded(origin, state, cause, kind.name, provider.name, provider.contract))
            return None
        found = Registered(kind=kind.name, provider=provider, origin=origin)
        self._providers[kind.name].append(found)
        return found


def _call_hook(implementation: Callable[[], Any], kind: Kind, origin: Origin) -> list[Provider[Any]]:
    """What one hook implementation yields, checked. Raises PluginError naming plugin, hook and fault."""
    try:
        result = implementation()
        offered = [result] if isinstance(result, Provider) else list(_iterable(result))
    except (Exception, SystemExit) as error:  # third-party code may raise anything; the cause is reported by name
        logger.debug("%s: %s raised", origin.described, kind.hook, exc_info=True)
        raise PluginError(f"{origin.described}: {kind.hook}() failed: {root_cause(error)}") from error
    for provider in offered:
        problem = provider_problem(kind, provider)
        if problem:
            raise PluginError(f"{origin.described}: {kind.hook}() {problem}")
    return offered


def _iterable(result: Any) -> Iterable[Any]:
    if not isinstance(result, Iterable):
        raise TypeError(f"it returned {type(result).__name__}; yield Provider objects or return a list of them")
    return result


def provider_problem(kind: Kind, provider: Any) -> str | None:
    wanted = kind.provider_class()
    if not isinstance(provider, wanted):
        return f"yielded {type(provider).__name__}; the kind {kind.name} wants {wanted.__name__}"
    name = provider.name
    if not isinstance(name, str) or not _VALID_NAME.fullmatch(name) or name in (AUTO, kind.fallback):
        reserved = " or ".join(repr(word) for word in (AUTO, kind.fallback) if word)
        return f"yielded the name {name!r}; a name is lower case letters, digits and '_', and not {reserved}"
    if kind.ops() and getattr(provider, "op", None) not in kind.ops():
        return f"yielded {name!r} for the unknown op {getattr(provider, 'op', None)!r} (ops: {', '.join(kind.ops())})"
    if provider.options is not None and not (
        isinstance(provider.options, type) and issubclass(provider.options, BaseModel)
    ):
        return f"yielded {name!r} with options that are no pydantic model class: {provider.options!r:.60}"
    if not callable(provider.build) or not callable(provider.unavailable):
        return f"yielded {name!r} whose build or unavailable cannot be called"
    for row in provider.combines:
        if not isinstance(row, CompatibilityRow) or row.first != f"{kind.name}={name}":
            return (
                f"yielded {name!r} with a row for the compatibility table that is not about itself: write "
                f"CompatibilityRow('{kind.name}={name}', ...), got {row!r:.80}"
            )
    return None


def contract_problem(kind: Kind, provider: Provider[Any]) -> str | None:
    if kind.oldest_supported <= provider.contract <= kind.current:
        return None
    supported = (
        f"{kind.current}" if kind.oldest_supported == kind.current else f"{kind.oldest_supported} to {kind.current}"
    )
    return (
        f"written for version {provider.contract} of the {kind.name} contract, this hotswap supports {supported}; "
        f"what changed: {kind.docs}"
    )


def _describe_conflict(claimants: Sequence[Registered]) -> str:
    owners = sorted((found.origin for found in claimants), key=lambda origin: (not origin.builtin, origin.owner))
    what = f"{label(claimants[0].kind, claimants[0].op)} {claimants[0].name!r}"
    if len({normalized(owner.distribution) for owner in owners}) == 1:
        places = " and ".join(owner.target for owner in owners)
        return f"{owners[0].owner} offers {what} more than once ({places}); it must offer it once"
    named = " and ".join(owner.owner for owner in owners)
    ways = " or ".join(f"--plugin no:{owner.distribution}" for owner in owners if not owner.builtin)
    return f"{what} is offered by {named}; keep one with {ways}"
