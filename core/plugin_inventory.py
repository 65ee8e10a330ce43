"""What is installed, active, rejected, blocked or failed, and why: the rows of `hotswap plugins`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from .compatibility import ROWS, rows_about
from .contracts.attention import AttentionContext
from .contracts.kernels import KernelContext
from .contracts.kinds import KINDS, Kind
from .contracts.provider import BuildContext, CompatibilityRow
from .errors import PluginError
from .plugin_choice import fallback_words
from .plugin_manager import PluginManager
from .plugin_registry import NotLoaded, Registered

_CHOSEN_BY: dict[str, str] = {
    "automatic": "the highest priority that can run",
    "default": "the default",
    "policy": "the policy's default_victim",
    "checkpoint": "what the checkpoint needs",
    "model argument": "what the model argument needs",
    "operator": "nothing",
}

State = Literal["active", "available", "rejected", "blocked", "failed"]


class InventoryRow(msgspec.Struct, frozen=True):
    """One provider (for kernels: of all ops that it serves), or a plugin that is not there (kind empty).

    reasons: why it is rejected, blocked or failed; for a provider of several ops, which ones it serves.
    """

    kind: str
    name: str
    distribution: str
    version: str
    contract: int | None
    state: State
    reasons: list[str]


def inventory(manager: PluginManager, context: BuildContext) -> list[InventoryRow]:
    """Every row, by kind in the order of the kind table, then by name. What the engine chose is active; before there is
    a choice, what the automatic rule would choose on this host. `context.model` may be None; nothing is built."""
    rows: list[InventoryRow] = []
    for kind in KINDS.values():
        active = _active(manager, kind, context)
        names = {(found.name, found.distribution): found for found in manager.providers(kind.name)}
        for key in sorted(names):
            same = [found for found in manager.providers(kind.name) if (found.name, found.distribution) == key]
            rows.append(_row(manager, kind, same, active, context))
        rows.extend(_lost_row(lost) for lost in manager.not_loaded if lost.kind == kind.name)
    rows.extend(_lost_row(lost) for lost in manager.not_loaded if lost.kind is None)
    return rows


def explain(manager: PluginManager, kind: str, context: BuildContext) -> list[str]:
    """Why a kind's choice is what it is: a line for each candidate and one for the outcome."""
    row = KINDS[kind]
    versions = f"contract {row.current} (oldest supported: {row.oldest_supported})"
    lines = [f"{kind}: {row.active} active; chosen when nobody names one: {_CHOSEN_BY[row.chosen_by]}; {versions}"]
    for op in row.ops() or (None,):
        for found in manager.providers(kind, op):
            if row.chosen_by == "operator":  # nothing is chosen automatically: only whether it can run is of interest
                reasons = _reasons(manager, row, found, context)
            else:
                reasons = manager.automatic_reasons(found, context_for(row, context, op))
                if not found.provider.automatic:
                    reasons = [*reasons, *_reasons(manager, row, found, context)]
            verdict = "; ".join(reasons) or "can run"
            lines.append(f"  {found.described}, priority {found.provider.priority}: {verdict}")
            lines.extend(
                f"    with {other}: {'works' if combination.allowed else 'refused'}: {combination.reason}"
                for other, combination in _combinations(manager, found)
            )
    lines.extend(
        f"  {lost.described}: {lost.state}: {lost.cause}" for lost in manager.not_loaded if lost.kind in (kind, None)
    )
    lines.extend(f"  -> {op or kind}: {text}" for op, text in _outcomes(manager, row, context))
    return lines


def _combinations(manager: PluginManager, found: Registered) -> list[tuple[str, CompatibilityRow]]:
    """What the compatibility table says about a provider: (the other feature, row), the core's rows first."""
    feature = f"{found.kind}={found.name}"
    rows = rows_about(feature, [*ROWS, *manager.rows()])
    return [(row.second if row.first == feature else row.first, row) for row in rows]


def context_for(kind: Kind, context: BuildContext, op: str | None) -> BuildContext:
    """The kind's own context where `unavailable` may read more than the common fields."""
    common: dict[str, Any] = {name: getattr(context, name) for name in BuildContext.__dataclass_fields__}
    if kind.name == "attention":
        return AttentionContext(**common, block_size=context.config.cache.block_size)
    if kind.name == "kernels":
        return KernelContext(**common, op=op or "", dtype=context.model.dtype if context.model else "float32")
    return context


def _active(manager: PluginManager, kind: Kind, context: BuildContext) -> Sequence[Registered]:
    """What was chosen, or would be. Kinds that a checkpoint decides have no answer before there is one."""
    if kind.active == "any":
        return _named(manager, kind)
    made = [choice for (name, _), choice in manager.chosen.items() if name == kind.name]
    if made:
        return made
    undecided = kind.chosen_by in ("checkpoint", "model argument") and not manager.named(kind.name)
    if undecided:
        return []
    found = []
    for op in kind.ops() or (None,):
        try:
            choice = manager.preview(kind.name, context_for(kind, context, op), op=op)
        except PluginError:
            continue  # the rule has no answer; each row says why
        if choice is not None:
            found.append(choice)
    return found


def _named(manager: PluginManager, kind: Kind) -> Sequence[Registered]:
    try:
        return manager.named_providers(kind.name)
    except PluginError:
        return []  # the start is refused; `explain` says why


def _row(
    manager: PluginManager, kind: Kind, same: Sequence[Registered], active: Iterable[Registered], context: BuildContext
) -> InventoryRow:
    chosen = {(choice.name, choice.distribution, choice.op) for choice in active}
    serving = [found for found in same if (found.name, found.distribution, found.op) in chosen]
    rejections = [(found.op, reason) for found in same for reason in _reasons(manager, kind, found, context)]
    state: State = (
        "active" if serving else "rejected" if len({op for op, _ in rejections}) == len(same) else "available"
    )
    claims = [item.message for item in manager.conflicts() if any(found in item.claimants for found in same)]
    if claims:
        state, rejections = "failed", [(None, claim) for claim in claims]
    reasons = _sentences(rejections, len(same))
    if state in ("active", "available") and same[0].op:
        ops = ", ".join(sorted(str(found.op) for found in serving or same))
        reasons.insert(0, f"{'serves' if serving else 'offers'} {ops}")
    first = same[0]
    return InventoryRow(
        kind.name, first.name, first.distribution, first.version, first.provider.contract, state, reasons
    )


def _sentences(rejections: Sequence[tuple[str | None, str]], num_ops: int) -> list[str]:
    """With the op that each is about; one against all of several ops is said once, without."""
    against = Counter(reason for _, reason in rejections)
    general = {reason for reason, count in against.items() if count == num_ops > 1}
    return list(
        dict.fromkeys(f"{op}: {reason}" if op and reason not in general else reason for op, reason in rejections)
    )


def _reasons(manager: PluginManager, kind: Kind, found: Registered, context: BuildContext) -> list[str]:
    try:
        return manager.reasons_against(found, context_for(kind, context, found.op))
    except PluginError as error:
        return [str(error)]


def _outcomes(manager: PluginManager, kind: Kind, context: BuildContext) -> list[tuple[str | None, str]]:
    if kind.active == "any":
        return [(None, text) for text in _outcomes_of_any(manager, kind, context)]
    outcomes: list[tuple[str | None, str]] = []
    for op in kind.ops() or (None,):
        if kind.chosen_by in ("checkpoint", "model argument") and not manager.named(kind.name):
            outcomes.append((op, f"decided by the {kind.chosen_by} at start"))
            continue
        try:
            choice = manager.preview(kind.name, context_for(kind, context, op), op=op)
            outcomes.append((op, f"{choice.name} ({choice.why})" if choice else fallback_words(kind)))
        except PluginError as error:
            outcomes.append((op, f"refused: {error}"))
    return outcomes


def _outcomes_of_any(manager: PluginManager, kind: Kind, context: BuildContext) -> list[str]:
    """One line for each that the operator named, in the order in which they work."""
    try:
        named = manager.named(kind.name)
    except PluginError as error:
        return [f"refused: {error}"]
    lines = []
    for place, selection in enumerate(named, start=1):
        try:
            choice = manager.choose_anew(kind.name, selection.name, context, selection.options, where=selection.where)
            lines.append(f"{place}. {choice.name} ({choice.why})")
        except PluginError as error:
            lines.append(f"{place}. refused: {error}")
    return lines or [f"none: --plugin {kind.name}=NAME activates one, and may be repeated"]


def _lost_row(lost: NotLoaded) -> InventoryRow:
    state: State = "blocked" if lost.state == "blocked" else "failed"
    origin = lost.origin
    return InventoryRow(
        lost.kind or "",
        lost.name or origin.name,
        origin.distribution,
        origin.version,
        lost.contract,
        state,
        [lost.cause],
    )
