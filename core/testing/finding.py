"""From what an author names (a module, a file, an entry point's value, a Provider) to the providers that it offers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ..contracts.kinds import KINDS
from ..contracts.provider import Provider
from ..errors import PluginError, UsageError
from ..plugin_discovery import Origin, file_origin, module_origin
from ..plugin_registry import ProviderRegistry, Registered, contract_problem, label, provider_problem
from ..plugin_selection import nearest

OBJECT_VERSION = "under test"


def origin_of(plugin: str) -> Origin:
    """Raises PluginError when a file is not there, and UsageError for an object in place of its name."""
    if not isinstance(plugin, str):
        raise UsageError(
            f"`plugin` is {plugin!r:.80}: write the name of the plugin's module as a string, such as "
            f"{getattr(plugin, '__name__', 'hotswap_mine')!r}, or give a Provider"
        )
    if plugin.endswith(".py"):
        return file_origin(plugin)
    module, colon, attribute = plugin.partition(":")
    if colon:
        return Origin("entry point", attribute, plugin, module_origin(module).distribution)
    return module_origin(plugin)


@functools.lru_cache(maxsize=64)
def _load(plugin: str) -> ProviderRegistry:
    registry = ProviderRegistry()
    registry.load(origin_of(plugin))
    return registry


def find_provider(
    kind: str, plugin: str | Provider[Any], name: str = "", op: str | None = None, *, fresh: bool = False
) -> Registered:
    """The one provider under test, past the checks of the plugin manager. Raises PluginError saying what is wrong with
    it, and UsageError when `plugin` offers several of the kind and `name` (or `op`) does not decide.

    fresh: call the hooks again instead of remembering what they gave.
    """
    row = KINDS[kind]
    if isinstance(plugin, Provider):
        problem = provider_problem(row, plugin)
        if problem:
            raise PluginError(f"the hook {problem}")
        mismatch = contract_problem(row, plugin)
        if mismatch:
            raise PluginError(f"{kind} {plugin.name!r}: {mismatch}")
        return Registered(kind=kind, provider=plugin, origin=Origin("module", plugin.name, "", OBJECT_VERSION))
    registry = _load.__wrapped__(plugin) if fresh else _load(plugin)
    offered = [found for found in registry.providers(kind, op) if name in ("", found.name)]
    if len(offered) == 1:
        return offered[0]
    if offered:
        several = ", ".join(f"{label(found.kind, found.op)}={found.name}" for found in offered)
        raise UsageError(f"{plugin} offers several providers of the kind {kind} ({several}): set `name`, or `op`")
    raise PluginError(_nothing_found(registry, kind, plugin, name))


def _nothing_found(registry: ProviderRegistry, kind: str, plugin: str, name: str) -> str:
    lost = [found.cause for found in registry.not_loaded if found.kind == kind and name in ("", found.name)]
    if lost:
        return f"{plugin}: {'; '.join(lost)}"
    names = [found.name for found in registry.providers(kind)]
    if names:
        return f"{plugin} offers no {kind} called {name!r}{nearest(name, names)} (offered: {', '.join(names)})"
    kinds = sorted({found.kind for every in KINDS for found in registry.providers(every)})
    return f"{plugin} offers no provider of the kind {kind}, only of {', '.join(kinds) or 'none'}"


def offered_by(plugin: str) -> Sequence[Registered]:
    """Everything that a module or file provides. Raises PluginError."""
    registry = _load(plugin)
    return [found for kind in KINDS for found in registry.providers(kind)]
