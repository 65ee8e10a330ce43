"""Several policies out of one command line: `--plugin policy=A --plugin policy=B` are two runs that differ in nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from ..errors import UsageError
from ..plugin_manager import PluginManager
from ..plugin_selection import COMMAND_LINE, Block, LoadRequest, Parsed, Selection, strongest

KINDS_AT_WORK: Final = ("scheduler", "policy", "victim", "observer")


@dataclass(frozen=True, slots=True)
class Variant:
    """One choice of plugins. label: the policy as the operator wrote it, `mlfq,levels=4`; "" when none was named."""

    label: str
    manager: PluginManager


def policy_variants(
    selections: Sequence[Parsed], builtins: tuple[str, ...], *, strict: bool = False
) -> tuple[Variant, ...]:
    """One variant for each policy that the strongest source names, in its order; one with the default policy when none
    does. What is loaded and chosen besides is the same for all. Raises PluginError or UsageError."""
    bare = [item for item in selections if isinstance(item, Selection) and item.kind is None]
    first = [
        item
        for item in selections
        if isinstance(item, Block | LoadRequest) or (item.kind not in (None, "policy") and _counts(item))
    ]
    base = PluginManager(builtins=builtins, selections=first, strict=strict)
    base.load()
    resolved = {id(item): base.with_kind(item) for item in bare}
    named = [item for item in resolved.values() if _counts(item)]
    activated = [item for item in base.selections if item.kind == "policy"]  # by the files and modules that were named
    policies = strongest([*_policies(selections, resolved, activated)])
    common = [item for item in [*base.selections, *named] if item.kind != "policy"]
    labels = [_label(item) for item in policies]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"policy {label} is given twice")
    frozen = base.frozen()
    managers = [
        PluginManager.from_frozen(msgspec.structs.replace(frozen, selections=[*common, *chosen]))
        for chosen in ([[policy] for policy in policies] or [[]])
    ]
    return tuple(Variant(label, manager) for label, manager in zip(labels or [""], managers, strict=True))


def _counts(selection: Selection) -> bool:
    """Whether a choice is about a kind that takes part. One on the command line that does not is an error: it would
    change nothing."""
    if selection.kind in KINDS_AT_WORK:
        return True
    if selection.source == COMMAND_LINE:
        raise UsageError(
            f"{selection.where}: a simulation has no {selection.kind} plugin (it has {', '.join(KINDS_AT_WORK)})"
        )
    return False


def _policies(
    selections: Sequence[Parsed], resolved: dict[int, Selection], activated: Sequence[Selection]
) -> list[Selection]:
    """Every choice of a policy in the operator's order."""
    found: list[Selection] = []
    for item in selections:
        if isinstance(item, LoadRequest):
            found += [policy for policy in activated if policy.spelled == item.spelled]
        elif isinstance(item, Selection) and (item := resolved.get(id(item), item)).kind == "policy":
            found.append(item)
    return found


def _label(policy: Selection) -> str:
    options = "".join(f",{name}={msgspec.json.encode(value).decode()}" for name, value in policy.options.items())
    return policy.name + options.replace('"', "")
