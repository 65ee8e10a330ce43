"""Discover, select, refuse, build. The one place where the engine meets its plugins; called at start-up and shutdown
only.

    manager = PluginManager(builtins=BUILTIN_PLUGINS, selections=[("command line", "policy=fair_share,half_life=5")])
    manager.load()
    policy = manager.build("policy", PolicyContext(...))

Precedence: command line > config file > implied by the checkpoint > automatic. A named choice never falls back. Every
refusal is a PluginError of one line for the reader.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from .contracts.kinds import KINDS
from .contracts.policy import PolicyProvider
from .contracts.provider import BuildContext, CompatibilityRow
from .errors import HotswapError, PluginError
from .plugin_choice import Choice, Chooser, Suits, failure, fallback_words, kind_row
from .plugin_discovery import (
    Origin,
    builtin_origins,
    check_same_version,
    entry_point_origins,
    file_origin,
    module_origin,
    owner_of,
    root_cause,
    same_name,
)
from .plugin_options import validated_options
from .plugin_registry import Conflict, NotLoaded, ProviderRegistry, Registered, label
from .plugin_selection import (
    AUTO,
    COMMAND_LINE,
    Block,
    LoadRequest,
    Parsed,
    Selection,
    agree,
    nearest,
    parse_all,
    strongest,
)

if TYPE_CHECKING:
    from .plugin_inventory import InventoryRow

__all__ = ["Choice", "FrozenPlugins", "PluginManager", "Registered", "Suits"]

logger = logging.getLogger("hotswap.plugins")


class FrozenPlugins(msgspec.Struct, frozen=True):
    """The plugins and choices of one start, as a message for the other processes."""

    plugins: list[Origin]
    selections: list[Selection]
    blocks: list[Block]
    not_loaded: list[NotLoaded]  # for the inventory
    strict: bool = False


class PluginManager:
    """See the module's docstring. Not thread-safe: used by one thread at start-up."""

    def __init__(
        self, *, builtins: Sequence[str] = (), selections: Iterable[tuple[str, str] | Parsed] = (), strict: bool = False
    ) -> None:
        """builtins: module paths. selections: (source, value of --plugin) pairs, or parsed ones. strict: a broken
        plugin that nobody asked for is an error. Raises PluginError on a value that cannot be parsed."""
        parsed = parse_all(selections)
        self.selections = [item for item in parsed if isinstance(item, Selection)]
        self._load_requests = [item for item in parsed if isinstance(item, LoadRequest)]
        self._builtins = tuple(builtins)
        self._strict = strict
        self._registry = ProviderRegistry([item for item in parsed if isinstance(item, Block)])
        self._chooser = Chooser(self._registry, self.selections, strict)
        # The latest answer of `choose` by kind and op; for kinds with any number active by kind and name.
        self.chosen: dict[tuple[str, str | None], Choice] = {}

    # Loading.

    def load(self, *, tolerate_conflicts: bool = False) -> None:
        """Loads built-ins, entry points and what the operator named, then checks every explicit choice. Raises
        PluginError.

        tolerate_conflicts: for `hotswap plugins`, which shows them.
        """
        for origin in [*builtin_origins(self._builtins), *entry_point_origins()]:
            self._registry.try_load(origin)
        for request in self._load_requests:
            self._load_named(request)
        self._report_failures()
        conflicts = self._registry.conflicts()
        if conflicts and not tolerate_conflicts:
            raise PluginError("; ".join(conflict.message for conflict in conflicts))
        self._check_blocks()
        self.selections[:] = [self.with_kind(selection) for selection in self.selections]
        self._check_selections()

    @classmethod
    def from_frozen(cls, frozen: FrozenPlugins) -> PluginManager:
        """The same plugins and choices in another process. Raises PluginError naming what cannot be loaded here."""
        manager = cls(selections=[*frozen.selections, *frozen.blocks], strict=frozen.strict)
        for origin in frozen.plugins:
            check_same_version(origin)
            try:
                manager._registry.load(origin)
            except PluginError as error:
                raise PluginError(f"{error} (in this process; it loaded where the engine was started)") from error
        manager._registry.not_loaded = list(frozen.not_loaded)
        return manager

    def frozen(self) -> FrozenPlugins:
        """What `from_frozen` needs; encode it with msgspec."""
        registry = self._registry
        return FrozenPlugins(
            list(registry.loaded), list(self.selections), list(registry.blocks), list(registry.not_loaded), self._strict
        )

    # Asking.

    def providers(self, kind: str, op: str | None = None) -> list[Registered]:
        """Everything that can be chosen for a kind (and op), blocked and failed ones left out."""
        return self._registry.providers(kind_row(kind).name, op)

    @property
    def not_loaded(self) -> Sequence[NotLoaded]:
        return self._registry.not_loaded

    def conflicts(self) -> list[Conflict]:
        """Names that two plugins claim; empty after a `load` that did not tolerate them."""
        return self._registry.conflicts()

    def reasons_against(self, found: Registered, context: BuildContext) -> list[str]:
        """Every reason why a provider cannot run in this context. Raises PluginError when the plugin fails to
        answer."""
        return self._chooser.reasons_against(found, context)

    def automatic_reasons(self, found: Registered, context: BuildContext, suits: Suits | None = None) -> list[str]:
        """Why the automatic choice passes a provider over; empty when it is a candidate."""
        return self._chooser.automatic_reasons(found, context, suits)

    def owner_of(self, error: BaseException) -> Origin | None:
        """The plugin whose code raised `error`; None when it was the core's own."""
        return owner_of(error, self._registry.loaded)

    def inventory(self, context: BuildContext) -> list[InventoryRow]:
        """The rows of `hotswap plugins`; `context.model` may be None."""
        from .plugin_inventory import inventory

        return inventory(self, context)

    def ops(self, kind: str) -> list[str]:
        """The ops that some provider of a per-op kind offers."""
        return sorted({found.op for found in self.providers(kind) if found.op})

    def choose(
        self,
        kind: str,
        context: BuildContext,
        *,
        op: str | None = None,
        implied: str | None = None,
        suits: Suits | None = None,
    ) -> Choice:
        """The one selection rule. Raises PluginError when the rule has no answer, or a choice cannot run here.

        op: of kinds with one active per op. implied: the name that the checkpoint asks for. suits: limits the automatic
            choice.
        """
        choice = self.choose_or_none(kind, context, op=op, implied=implied, suits=suits)
        if choice is None:
            raise PluginError(f"{label(kind, op)}: no plugin was chosen; {fallback_words(kind_row(kind))}")
        return choice

    def choose_or_none(
        self,
        kind: str,
        context: BuildContext,
        *,
        op: str | None = None,
        implied: str | None = None,
        suits: Suits | None = None,
    ) -> Choice | None:
        """`choose`, for kinds with a fallback in the core: None means that it serves, by name or because nothing else
        can."""
        choice = self.preview(kind, context, op=op, implied=implied, suits=suits)
        if choice is not None:
            self.chosen[kind, op] = choice
        return choice

    def preview(
        self,
        kind: str,
        context: BuildContext,
        *,
        op: str | None = None,
        implied: str | None = None,
        suits: Suits | None = None,
    ) -> Choice | None:
        """What `choose_or_none` would answer; leaves no trace in `chosen`."""
        row = kind_row(kind)
        selection = self._chooser.explicit(row, op)
        if selection is not None and selection.name != AUTO:
            if selection.name == row.fallback:
                return None
            return self._chooser.named(row, selection.name, context, op, selection.where, selection)
        if implied is not None:
            return self._chooser.named(row, implied, context, op, "implied by the model")
        if row.chosen_by == "policy":
            return self._chooser.named(row, *self._default_victim(context))
        if row.default is not None:
            return self._chooser.named(row, row.default, context, op, "default")
        return self._chooser.automatic(row, context, op, suits)

    def _default_victim(self, context: BuildContext) -> tuple[str, BuildContext, None, str]:
        """The name that the policy in force asks for, as arguments of `Chooser.named`."""
        policy = self.chosen.get(("policy", None)) or self.preview("policy", context)
        if policy is None or not isinstance(policy.provider, PolicyProvider):
            raise PluginError("a victim rule is chosen by the policy, and there is none")
        return policy.provider.default_victim, context, None, f"default_victim of {policy.described}"

    def named(self, kind: str) -> list[Selection]:
        """The operator's explicit choices of a kind in the order given, strongest source only; of kinds with any number
        active each name once, and `auto` means none. Raises PluginError for one name with two sets of options."""
        found = strongest([selection for selection in self.selections if selection.kind == kind])
        if kind_row(kind).active != "any":
            return found
        by_name: dict[str, list[Selection]] = {}
        for selection in found:
            if selection.name != AUTO:
                by_name.setdefault(selection.name, []).append(selection)
        agreed = [agree(same, f"{kind} {name!r}") for name, same in by_name.items()]
        return [selection for selection in agreed if selection is not None]

    def named_providers(self, kind: str) -> list[Registered]:
        """The providers that the operator named for a kind with any number active, in that order. Raises PluginError."""
        row = kind_row(kind)
        return [self._chooser.find(row, found.name, found.op, found.where) for found in self.named(kind)]

    def is_explicit(self, kind: str) -> bool:
        """Whether the operator named a plugin for a kind with one active."""
        selection = self._chooser.explicit(kind_row(kind), None)
        return selection is not None and selection.name != AUTO

    def choose_anew(
        self, kind: str, name: str, context: BuildContext, options: Mapping[str, Any] | None = None, *, where: str
    ) -> Choice:
        """A choice that somebody makes while the engine runs, under the same checks; `adopt` makes it the one in force.
        where: who asks, for messages. Raises PluginError."""
        selection = Selection(COMMAND_LINE, where, name, kind, options=dict(options or {}))
        return self._chooser.named(kind_row(kind), name, context, None, where, selection)

    def adopt(self, choice: Choice) -> None:
        """From now on the inventory shows this one as active."""
        self.chosen[choice.kind, choice.op] = choice

    def rows(self) -> list[CompatibilityRow]:
        """What the loaded plugins add to the compatibility table."""
        return [row for kind in KINDS for found in self.providers(kind) for row in found.provider.combines]

    # Building.

    def build(
        self,
        kind: str,
        context: BuildContext,
        *,
        op: str | None = None,
        implied: str | None = None,
        suits: Suits | None = None,
    ) -> Any:
        """Chooses, then builds with the validated options in `context.options`. Raises PluginError naming the
        plugin."""
        return self.build_choice(self.choose(kind, context, op=op, implied=implied, suits=suits), context)

    def build_named(self, kind: str, name: str, context: BuildContext, *, op: str | None = None) -> Any:
        """Builds one provider by name, with the options that the operator gave it, if any: for `BuildContext.resolve`
        and for kinds with any number active."""
        row = kind_row(kind)
        selection = next((found for found in self.named(kind) if found.name == name and found.op in (None, op)), None)
        where = selection.where if selection else f"asked for as {label(kind, op)} {name!r}"
        return self.build_choice(self._chooser.named(row, name, context, op, where, selection), context)

    def build_all(self, kind: str, context: BuildContext) -> list[tuple[Choice, Any]]:
        """Builds what the operator named for a kind with any number active, in that order. Raises PluginError."""
        row = kind_row(kind)
        built: list[tuple[Choice, Any]] = []
        for selection in self.named(kind):
            choice = self._chooser.named(row, selection.name, context, None, selection.where, selection)
            self.chosen[kind, choice.name] = choice
            built.append((choice, self.build_choice(choice, context)))
        return built

    def build_choice(self, choice: Choice, context: BuildContext) -> Any:
        """Builds what was chosen and checks what comes back against the kind's abstract class."""
        try:
            product = choice.provider.build(dataclasses.replace(context, options=choice.options))
        except HotswapError:
            raise  # written for the reader already
        except (Exception, SystemExit) as error:  # third-party code may raise anything; it is named
            logger.debug("%s failed to build", choice.described, exc_info=True)
            raise PluginError(f"{choice.described} failed to build: {root_cause(error)}") from error
        wanted = kind_row(choice.kind).product_class(choice.op)
        if not isinstance(product, wanted):
            raise PluginError(f"{choice.described} built a {type(product).__name__}, which is no {wanted.__name__}")
        return product

    # Checks at load.

    def _load_named(self, request: LoadRequest) -> None:
        """Loads what the operator named and chooses what it provides."""
        where = f"{request.spelled}, {request.source}"
        try:
            origin = file_origin(request.target) if request.is_file else module_origin(request.target)
            offered = self._registry.load(origin)
        except PluginError as error:
            raise PluginError(f"{error} ({where})") from error
        if not offered:
            lost = [failure(lost) for lost in self.not_loaded if lost.origin == origin]
            raise PluginError(
                f"{origin.described} leaves nothing to choose ({where}): {'; '.join(lost) or 'it is empty'}"
            )
        if request.options and len(offered) > 1:
            names = ", ".join(f"{found.kind}={found.name}" for found in offered)
            raise PluginError(
                f"{where}: whose options are these? It provides {names}; give them with --plugin KIND=NAME"
            )
        for found in offered:
            self._activate(found, offered, request)

    def _activate(self, found: Registered, offered: Sequence[Registered], request: LoadRequest) -> None:
        """Chooses one provider of a named file or module. Where it brings several of a kind, the operator's KIND=NAME
        must decide between them."""
        rivals = [other.name for other in offered if other.kind == found.kind and other.op == found.op]
        if len(rivals) > 1 and KINDS[found.kind].active != "any":
            same_source = [item for item in self.selections if item.source == request.source]
            if any(item.kind in (found.kind, None) and item.name in rivals for item in same_source):
                return
            several = " and ".join(map(repr, sorted(rivals)))
            raise PluginError(
                f"{request.spelled}, {request.source}: it provides {found.kind} {several}, of which one can be active: "
                f"add --plugin {found.kind}=NAME"
            )
        self.selections.append(
            Selection(request.source, request.spelled, found.name, found.kind, found.op, request.options)
        )

    def _report_failures(self) -> None:
        causes = [failure(lost) for lost in self.not_loaded if lost.state == "failed"]
        if causes and self._strict:
            raise PluginError(f"{'; '.join(causes)} (--strict-plugins)")
        for cause in causes:
            logger.warning("%s", cause)

    def _check_blocks(self) -> None:
        for block in self._registry.blocks:
            if block not in self._registry.used_blocks:
                known = {found.name for kind in KINDS for found in self.providers(kind)}
                known |= {origin.distribution for origin in self._registry.loaded}
                raise PluginError(
                    f"{block.spelled}, {block.source}: nothing of that name is installed{nearest(block.name, known)}"
                )

    def with_kind(self, selection: Selection) -> Selection:
        """Finds the kind of `--plugin NAME`, once the plugins are loaded. Raises PluginError."""
        if selection.kind is not None:
            return selection
        kinds = [kind for kind in KINDS if any(found.name == selection.name for found in self.providers(kind))]
        if len(kinds) == 1:
            return msgspec.structs.replace(selection, kind=kinds[0])
        if kinds:
            ways = " or ".join(f"--plugin {kind}={selection.name}" for kind in kinds)
            raise PluginError(f"{selection.where}: {selection.name!r} is the name of {len(kinds)} kinds; write {ways}")
        raise PluginError(self._unknown_bare_name(selection))

    def _unknown_bare_name(self, selection: Selection) -> str:
        name = selection.name
        for lost in self.not_loaded:
            if same_name(name, lost.name or lost.origin.name) or same_name(name, lost.origin.distribution):
                verdict = f"is blocked by {lost.cause}" if lost.state == "blocked" else f"is not there: {failure(lost)}"
                return f"{name!r} ({selection.where}) {verdict}"
        everything = [found for kind in KINDS for found in self.providers(kind)]
        offered = [found for found in everything if same_name(name, found.distribution) or found.origin.name == name]
        if offered:
            ways = ", ".join(f"--plugin {found.kind}={found.name}" for found in offered)
            return f"{selection.where}: {name!r} names no plugin of any kind; what it provides: {ways}"
        near = nearest(name, {found.name for found in everything})
        return f"{selection.where}: no plugin of any kind is called {name!r}{near} (see: hotswap plugins)"

    def _check_selections(self) -> None:
        """Names, options and rivals of every explicit choice, before anything is built."""
        for selection in self.selections:
            kind = kind_row(selection.kind or "")
            if selection.name in (AUTO, kind.fallback):
                continue
            found = self._chooser.find(kind, selection.name, selection.op, selection.where)
            validated_options(found, selection.options, selection.where)
        for kind in KINDS.values():
            if kind.active == "any":
                self.named(kind.name)
                continue
            for op in self.ops(kind.name) if kind.active == "one per op" else [None]:
                self._chooser.explicit(kind, op)
