"""`hotswap plugins check NAME`: runs the conformance suite of its kind on a plugin, and says line by line what held."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hotswap.core.errors import UsageError
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.plugin_selection import COMMAND_LINE, Block, parse

from .progress import ProgressLine
from .settings import Settings, builtin_plugins

if TYPE_CHECKING:
    from hotswap.core.plugin_registry import Registered
    from hotswap.core.plugin_selection import Selection
    from hotswap.core.testing.check import Outcome, Report

_MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}


def check(subject: str, settings: Settings, *, details: bool) -> int:
    """Checks what `subject` names: NAME, KIND=NAME[,OPTION=VALUE...], ./file.py or some.module. Returns 0 when every check
    that could run passed, 1 when one failed. Raises PluginError or UsageError when there is nothing to check.

    details: print all that pytest has to say about a failure, and take the time to find a small example for it.
    """
    from hotswap.core.testing.check import require_testing

    require_testing()
    found = _chosen(subject, settings)
    reports = [_check_one(registered, selection, details) for registered, selection in found]
    return 0 if all(report.ok for report in reports) else 1


def _chosen(subject: str, settings: Settings) -> Sequence[tuple[Registered, Selection]]:
    spelled = f"check {subject}"
    wanted = parse(subject, COMMAND_LINE, spelled=spelled)
    if isinstance(wanted, Block):
        raise UsageError(f"{spelled}: this blocks a plugin; name one to check")
    manager = PluginManager(builtins=builtin_plugins(), selections=[*settings.selections(), wanted])
    manager.load()
    chosen = [selection for selection in manager.selections if selection.spelled == spelled]
    found = [
        (registered, selection)
        for selection in chosen
        for registered in manager.providers(selection.kind or "", selection.op)
        if registered.name == selection.name
    ]
    if not found:
        raise UsageError(f"{spelled}: this is the core's own, not a plugin")
    return found


def _check_one(found: Registered, selection: Selection, details: bool) -> Report:
    from hotswap.core.testing.check import run_suite

    print(f"{found.described}, contract {found.provider.contract}")
    lines = _Lines(found.kind)
    report = run_suite(
        found.kind, found.module, selection.options, name=found.name, op=found.op, shrink=details, listener=lines
    )
    lines.close()
    if details:
        for finding in report.failed:
            print(f"\n--- {_title(finding.name)}\n{finding.details}")
    counts = [(len(report.passed), "passed"), (len(report.failed), "failed"), (len(report.skipped), "skipped")]
    told = ", ".join(f"{number} {what}" for number, what in counts if number)
    print(f"{told}: {found.name} {_verdict(found.kind, report)}")
    return report


def _verdict(kind: str, report: Report) -> str:
    if report.failed:
        return f"does not keep the {kind} contract"
    if any(finding.reason.startswith("cannot ") for finding in report.skipped):
        return f"keeps the {kind} contract as far as it could be checked here"
    return f"keeps the {kind} contract" if report.ok else "could not be checked"


def _title(name: str) -> str:
    """'test_peek_changes_nothing' -> 'peek changes nothing'."""
    return name.removeprefix("test_").replace("_", " ")


class _Lines:
    """One line a check, and on a terminal a moving one for the check that runs."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._told: set[str] = set()
        self._progress = ProgressLine() if sys.stderr.isatty() else None

    def started(self, name: str, index: int, total: int) -> None:
        if self._progress is not None:
            self._progress(f"[{index + 1}/{total}] {_title(name)}", 0, 0)

    def ended(self, name: str, outcome: Outcome, reason: str) -> None:
        self.close()
        again = outcome == "failed" and reason in self._told
        said = "the same as above" if again else reason
        print(f"  {_MARKS[outcome]:<8} {_title(name)}{f': {said}' if said else ''}")
        if outcome == "failed" and not again:
            self._told.add(reason)
            if rule := self._rule(name):
                print(f"           the rule: {rule}")
        sys.stdout.flush()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()

    def _rule(self, name: str) -> str:
        """The docstring of the check."""
        from hotswap.core.testing.suites import suite_of

        test = getattr(suite_of(self._kind), name.partition("[")[0], None)
        return " ".join((inspect.getdoc(test) or "").split())
