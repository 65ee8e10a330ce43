"""Runs a kind's conformance suite on one provider: what `hotswap plugins check` does, and how broken samples are tried.

    report = run_suite("policy", "hotswap_my_policy")
    report.ok, report.passed, report.failed, report.skipped

The suite runs in this process, under a pytest of its own: no configuration, conftest or plugin of the caller's takes part.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pluggy

from ..contracts.provider import Provider
from ..errors import UsageError
from .limits import TookTooLong, time_limit

if TYPE_CHECKING:
    import pytest

_pytest_hook = pluggy.HookimplMarker("pytest")  # pytest itself is imported when a suite runs

Outcome = Literal["passed", "failed", "skipped"]

_NEEDED = ("pytest", "hypothesis")
CHECK_SECONDS = 120.0  # a check that is not done by then has failed; ten times as long when examples are made small
HURRIED_SECONDS = 10.0  # for those after it: what hangs in one hangs in many
_ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
_TEST_FILE = """\
from hotswap.core.testing.check import take_pending

TestConformance = take_pending({ticket})
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """A check that did not pass. reason: one line. details: all that pytest has to say."""

    name: str
    reason: str
    details: str = ""


@dataclass(slots=True)
class Report:
    """Names are those of the suite's test functions, with the parameters where there are any."""

    passed: list[str] = field(default_factory=list)
    failed: list[Finding] = field(default_factory=list)
    skipped: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.passed) and not self.failed


class CheckListener(Protocol):
    """Told of each check as it runs."""

    def started(self, name: str, index: int, total: int) -> None:
        """Check `index` of `total`, from 0."""

    def ended(self, name: str, outcome: Outcome, reason: str) -> None:
        """reason: one line; empty when it passed."""


def require_testing() -> None:
    """Raises UsageError when pytest or hypothesis is not installed."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the conformance kit needs {' and '.join(missing)}, not installed here: pip install 'hotswap[testing]'"
        )


def run_suite(
    kind: str,
    plugin: str | Provider[Any],
    options: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    op: str | None = None,
    shrink: bool = True,
    only: str = "",
    listener: CheckListener | None = None,
) -> Report:
    """Runs the suite of `kind`. plugin, name, op, options, shrink: as in ConformanceSuite. only: pytest's `-k`, to run some
    of the checks. Raises UsageError when pytest or hypothesis is missing, or the kind is unknown.
    """
    require_testing()
    import pytest

    from ..contracts.kinds import KINDS
    from ..plugin_selection import nearest

    if kind not in KINDS:
        raise UsageError(f"unknown plugin kind {kind!r}{nearest(kind, KINDS)} (kinds: {', '.join(KINDS)})")
    attributes = {"plugin": plugin, "name": name, "op": op, "options": dict(options or {}), "shrink": shrink}
    recorder = _Recorder(listener, CHECK_SECONDS * (10 if shrink else 1))
    ticket = next(_tickets)
    _pending[ticket] = (kind, attributes)
    try:
        with tempfile.TemporaryDirectory(prefix="hotswap-check-") as folder, _environment():
            file = Path(folder, f"test_conformance_{ticket}.py")
            file.write_text(_TEST_FILE.format(ticket=ticket))
            settings = Path(folder, "pytest.ini")
            settings.write_text("[pytest]\n")
            arguments = ["-c", str(settings), "--rootdir", folder, "--import-mode=importlib", "-p", "no:terminal"]
            # Both collect garbage several times a run, which takes long where torch is loaded.
            arguments += ["-p", "no:unraisableexception", "-p", "no:threadexception"]
            arguments += ["-p", "no:cacheprovider", "-p", "hotswap.core.testing.pytest_plugin", "-k", only, str(file)]
            pytest.main(arguments, plugins=[recorder])
    finally:
        _pending.pop(ticket, None)
    return recorder.report


def take_pending(ticket: int) -> type[Any]:
    """The suite that `run_suite` is about to run. Made inside pytest, which then explains the suite's assertions."""
    from .suites import suite_of

    kind, attributes = _pending[ticket]
    return type("TestConformance", (suite_of(kind),), attributes)


_pending: dict[int, tuple[str, dict[str, Any]]] = {}
_tickets = itertools.count()


class _Recorder:
    """A pytest plugin that fills a Report."""

    def __init__(self, listener: CheckListener | None, seconds: float) -> None:
        self.report = Report()
        self._seconds = seconds
        self._listener = listener
        self._total = 0
        self._started = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add("the suite", "failed", _reason(report), report.longreprtext)

    def pytest_internalerror(self, excrepr: Any) -> None:
        self._add("the suite", "failed", str(excrepr).strip().splitlines()[-1], str(excrepr))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._listener is not None:
            self._listener.started(_check_name(nodeid), self._started, self._total)
        self._started += 1

    @_pytest_hook(wrapper=True)
    def pytest_pyfunc_call(self) -> Generator[None, object, object]:
        """No check goes on for ever."""
        try:
            with time_limit(self._seconds):
                return (yield)
        except TookTooLong:
            self._seconds = min(self._seconds, HURRIED_SECONDS)
            raise

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            reason = "" if report.passed else _reason(report)
            self._add(_check_name(report.nodeid), report.outcome, reason, report.longreprtext)

    def _add(self, name: str, outcome: Outcome, reason: str, details: str) -> None:
        if outcome == "passed":
            self.report.passed.append(name)
        else:
            getattr(self.report, outcome).append(Finding(name, reason, details))
        if self._listener is not None:
            self._listener.ended(name, outcome, reason)


def _check_name(nodeid: str) -> str:
    return nodeid.rpartition("::")[2]


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of the error's message, without the path of its class."""
    longrepr: Any = report.longrepr
    if isinstance(longrepr, tuple):  # a skip: file, line, reason
        return str(longrepr[2]).removeprefix("Skipped: ").splitlines()[0]
    crash = getattr(longrepr, "reprcrash", None)
    text = str(getattr(crash, "message", None) or longrepr).strip()
    first = text.splitlines()[0] if text else "failed"
    kind, colon, message = first.partition(": ")
    if colon and " " not in kind:
        kind = kind.rpartition(".")[2]
        return message if kind in ("AssertionError", "Failed", "PluginError", "TookTooLong") else f"{kind}: {message}"
    return first


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """pytest reads these when it starts: whatever is set for the caller's own tests must not reach the suite."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


__all__ = ["CheckListener", "Finding", "Outcome", "Report", "require_testing", "run_suite", "take_pending"]
