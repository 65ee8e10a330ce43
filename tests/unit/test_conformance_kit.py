"""The conformance kit itself: how a plugin is named and found, what a report says, the pytest plugin, the command."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from hotswap.core.contracts import KeyedPolicy, PolicyProvider, RequestView
from hotswap.core.errors import PluginError, UsageError
from hotswap.core.testing import check
from hotswap.core.testing.check import run_suite
from hotswap.core.testing.finding import find_provider
from hotswap.core.testing.limits import TookTooLong, no_real_time, time_limit
from hotswap.core.testing.scheduling_harness import fake_request
from hotswap.core.testing.suites import suite_of
from hotswap.core.testing.views import ReadOnlyView
from hotswap.server.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
FCFS = "hotswap.plugins.schedulers.policies.fcfs"


class ByArrival(KeyedPolicy):
    def key(self, view: RequestView) -> float:
        return view.arrival_time


def provider(**changes: object) -> PolicyProvider:
    settings: dict[str, object] = {"name": "under_test", "build": lambda context: ByArrival(), "summary": "by arrival"}
    return PolicyProvider(**(settings | changes))  # type: ignore[arg-type]


# Finding.


def test_a_module_of_several_needs_a_name() -> None:
    with pytest.raises(UsageError, match=r"several providers of the kind loader \(loader=.*set `name`"):
        find_provider("loader", "hotswap.plugins.loaders.providers")
    assert find_provider("loader", "hotswap.plugins.loaders.providers", "gguf").name == "gguf"
    with pytest.raises(PluginError, match="offers no loader called 'ggu'; did you mean 'gguf'"):
        find_provider("loader", "hotswap.plugins.loaders.providers", "ggu")


def test_a_module_of_another_kind_says_what_it_offers() -> None:
    with pytest.raises(PluginError, match="offers no provider of the kind victim, only of policy"):
        find_provider("victim", FCFS)


def test_a_provider_of_another_kind_is_refused() -> None:
    with pytest.raises(PluginError, match="the kind platform wants PlatformProvider"):
        find_provider("platform", provider())


def test_a_contract_mismatch_names_both_versions() -> None:
    with pytest.raises(PluginError, match="version 9 of the policy contract, this hotswap supports 1"):
        find_provider("policy", provider(contract=9))


def test_views_are_read_only_and_expire() -> None:
    view = ReadOnlyView(fake_request(3))
    assert view.num_prompt_tokens == 3
    with pytest.raises(AttributeError, match="read-only"):
        view.priority = 1
    with pytest.raises(AttributeError, match="has no 'prompt_token_ids'"):
        _ = view.prompt_token_ids
    view.expire()
    with pytest.raises(AttributeError, match="keep the fact, not the view"):
        _ = view.priority


# Running.


def test_report_of_a_sound_plugin() -> None:
    report = run_suite("policy", FCFS, only="starts_empty or options_are")
    assert report.ok
    assert report.passed == ["test_starts_empty"]
    assert [(found.name, found.reason) for found in report.skipped] == [
        ("test_options_are_documented_and_valid", "it takes no options")
    ]


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"summary": ""}, "test_summary_is_one_line", "has no summary"),
        ({"summary": "two\nlines"}, "test_summary_is_one_line", "several lines"),
        ({"name": "9lives"}, "test_name_is_lower_case", "name '9lives'"),
        ({"unavailable": lambda context: "not here"}, "test_unavailable_gives_every_reason", "not a sequence"),
        ({"unavailable": lambda context: [context.model.dtype]}, "test_unavailable_gives_every_reason", "NoneType"),
        ({"build": lambda context: object()}, "test_build_gives_the_kinds_class", "which is no Policy"),
        ({"contract": 7}, "test_contract_version", "written for version 7"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("test_") else "",
)
def test_generic_checks_reject(changes: dict[str, object], name: str, reason: str) -> None:
    report = run_suite("policy", provider(**changes), only=name)
    (finding,) = report.failed
    assert finding.name.startswith(name)
    assert reason in finding.reason
    assert not report.ok


def test_what_cannot_run_here_is_skipped_with_its_reasons() -> None:
    report = run_suite("policy", provider(unavailable=lambda context: ["no fan", "no belt"]), only="empty or name_is")
    assert report.passed == ["test_name_is_lower_case"]
    assert [found.reason for found in report.skipped] == ["cannot run here: no fan; no belt"]


def test_options_must_validate() -> None:
    report = run_suite("policy", FCFS, {"speed": 3}, only="starts_empty")
    assert "takes no options, got speed" in report.failed[0].reason


def test_a_hook_that_imports_torch_is_found(tmp_path: Path) -> None:
    source = Path(ROOT, "core/testing/templates/policy.py").read_text().replace("import annotations", "\\0", 1)
    file = tmp_path / "heavy_policy.py"
    file.write_text(source.replace("\\0", "import annotations\n\nimport torch"))
    report = run_suite("policy", str(file), only="hook_is_cheap")
    assert "calling its hooks imports torch" in report.failed[0].reason


def test_bare_assertions_are_explained() -> None:
    class AlwaysOne(ByArrival):
        def __len__(self) -> int:
            return 1

    report = run_suite("policy", provider(build=lambda context: AlwaysOne()), only="starts_empty")
    assert "assert 1 == 0" in report.failed[0].reason


class Hangs(ByArrival):
    def pop(self) -> RequestView:
        while len(self):
            with contextlib.suppress(Exception):
                self.peek()
        return super().pop()


def test_a_check_does_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CHECK_SECONDS", 0.8)
    monkeypatch.setattr(check, "HURRIED_SECONDS", 0.4)
    handler = signal.getsignal(signal.SIGALRM)
    only = "serves_each_request_once or nobody_waits or agrees_with or starts_empty"
    report = run_suite("policy", provider(build=lambda context: Hangs()), only=only, shrink=False)
    assert report.passed == ["test_starts_empty"]
    first, *others = [found.reason for found in report.failed]
    assert len(others) == 2
    assert re.match(r"not done after 0\.8 s; it was at .*\.py:\d+, in \w+$", first)
    assert [reason[:20] for reason in others] == ["not done after 0.4 s"] * 2
    assert signal.getsignal(signal.SIGALRM) is handler


def test_a_limit_goes_on_where_an_outer_one_was() -> None:
    with time_limit(3600.0):
        with pytest.raises(TookTooLong), time_limit(0.05):
            while True:
                pass
        assert 3500 < signal.getitimer(signal.ITIMER_REAL)[0] <= 3600


def test_the_real_clock_is_refused_and_logging_may_read_it() -> None:
    with no_real_time():
        logging.getLogger("hotswap.conformance").warning("a line has its time")
        with pytest.raises(
            AssertionError, match=r"time\.monotonic\(\) was called: the time is context\.clock\.now\(\)"
        ):
            time.monotonic()
    assert time.monotonic() > 0


@pytest.mark.parametrize("body", ["self.gone", "sys.exit(6)"])
def test_a_fault_in_any_call_is_told_as_it_was(body: str) -> None:
    """Not as what the check finds when it puts things away after it."""

    class Faulty(ByArrival):
        def key(self, view: RequestView) -> float:
            return float(eval(body))  # noqa: S307 - the test's own text

    report = run_suite(
        "policy", provider(build=lambda context: Faulty()), only="agrees_with or mechanism", shrink=False
    )
    assert len(report.failed) == 2
    for found in report.failed:
        assert "'gone'" in found.reason or found.reason == "SystemExit: 6"


def test_an_object_in_place_of_a_name_is_refused() -> None:
    with pytest.raises(UsageError, match="write the name of the plugin's module as a string, such as 'signal'"):
        find_provider("policy", signal)  # type: ignore[arg-type]


def test_missing_pytest_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_NEEDED", ("pytest", "hypothesis_that_is_not_there"))
    with pytest.raises(UsageError, match=r"hypothesis_that_is_not_there, .*pip install 'hotswap\[testing\]'"):
        run_suite("policy", FCFS)


def test_unknown_kind() -> None:
    with pytest.raises(UsageError, match="unknown plugin kind 'polcy'; did you mean 'policy'"):
        run_suite("polcy", FCFS)
    with pytest.raises(UsageError, match="unknown plugin kind 'polcy'"):
        suite_of("polcy")


def test_the_callers_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing_at_all")
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", raising=False)
    assert run_suite("policy", FCFS, only="starts_empty").ok
    assert os.environ["PYTEST_ADDOPTS"] == "-k nothing_at_all"
    assert "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ


# The command.


def run_command(*words: str) -> int:
    return main(["plugins", *words])


def test_check_prints_a_line_per_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("check", "victim=newest") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("victim 'newest' of hotswap ")
    assert "  ok       takes the only candidate" in lines
    assert lines[-1].endswith("newest keeps the victim contract")
    assert len(lines) == 2 + sum(line.startswith(("  ok", "  skipped")) for line in lines)


BROKEN_FILE = """
from hotswap.core.contracts import Provider, VictimRule, hookimpl


class First(VictimRule):
    def choose(self, candidates, num_blocks_needed):
        return candidates[0].request_id


@hookimpl
def hotswap_victim():
    yield Provider(name="first", build=lambda context: First(), summary="the first")
"""


@pytest.mark.parametrize("words", [("check", "FILE"), ("check", "first", "--plugin", "FILE")], ids=["file", "flag"])
def test_check_of_a_broken_file_fails(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "first_rule.py"
    file.write_text(BROKEN_FILE)
    assert run_command(*(str(file) if word == "FILE" else word for word in words)) == 1
    out = capsys.readouterr().out
    assert "  FAILED   chooses one of the candidates: choose() gave 0, which was not offered" in out
    assert "           the rule: `choose` returns one of the very objects that it was offered" in out
    assert out.splitlines()[-1].endswith("first does not keep the victim contract")


def test_one_cause_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "first_rule.py"
    file.write_text(BROKEN_FILE.replace("lambda context: First()", "lambda context: context.fan"))
    assert run_command("check", str(file)) == 1
    out = capsys.readouterr().out
    assert out.count("has no attribute 'fan'") == 1
    assert out.count(": the same as above") >= 5


@pytest.mark.parametrize("where", ["import sys; sys.exit(4)\n    yield", "yield sys.exit(4) or"])
def test_a_hook_that_exits_is_named(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "first_rule.py"
    file.write_text("import sys\n" + BROKEN_FILE.replace("yield", where))
    assert run_command("--plugin", str(file)) == 2
    err = capsys.readouterr().err
    assert "plugin file first_rule.py: hotswap_victim() failed: SystemExit: 4" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check"], "check takes one plugin"),
        (["check", "policy=fcsf"], "did you mean 'fcfs'?"),
        (["check", "no:fcfs"], "this blocks a plugin"),
        (["check", "kernels=reference"], "the core's own"),
        (["check", "policy=fcfs,speed=2"], "takes no options, got speed"),
        (["new"], "name a kind"),
        (["new", "polcy", "x"], "unknown kind 'polcy'; did you mean 'policy'?"),
        (["new", "policy"], "name the plugin"),
        (["new", "policy", "Fair-Share"], "cannot be a plugin's name"),
        (["new", "policy", "auto"], "has a meaning of its own"),
        (["new", "kernels", "reference"], "has a meaning of its own"),
        (["new", "policy", "f" * 41], "41 characters"),
        (["new", "policy", "fcfs"], "policy 'fcfs' is there already (hotswap "),
        (["explain", "policy", "fcfs"], "explain takes one KIND"),
    ],
    ids=" ".join,
)
def test_refusals_of_the_command(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_new_refuses_a_folder_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hotswap-take-turns").mkdir()
    assert run_command("new", "policy", "take_turns", "--dir", str(tmp_path)) == 2
    assert "exists already" in capsys.readouterr().err


# The pytest plugin.

AUTHORS_TEST = """
import sys
import pytest
HEAVY = {"torch", "hypothesis"} & set(sys.modules)

def test_harness(hotswap_scheduling_harness):
    from hotswap.core.testing.scheduling_harness import fake_request
    harness = hotswap_scheduling_harness(max_num_seqs=2)
    for number in range(3):
        harness.add(fake_request(number, max_tokens=2))
    harness.drain()
    assert len(harness.ended) == 3

def test_tiny_model(hotswap_tiny_model):
    assert callable(hotswap_tiny_model)

def test_seed(request):
    assert request.config.getoption("hotswap_seed") == 5

@pytest.mark.hotswap_device
def test_cheap():
    assert not HEAVY
"""


@pytest.fixture
def author_runs(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs pytest as an author would, where hotswap's plugin is loaded."""

    def run(source: str, *flags: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "test_author.py").write_text(source)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "hotswap.core.testing.pytest_plugin",
            "-p",
            "no:cacheprovider",
        ]
        return subprocess.run(
            [*command, *flags, "test_author.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_pytest_plugin(author_runs: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    result = author_runs(AUTHORS_TEST, "--strict-markers", "--hotswap-seed=5")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 passed" in result.stdout


def test_installed_plugin_is_loaded_once(tmp_path: Path) -> None:
    """As pyproject.toml declares it, by pytest itself: in an author's environment, and in this repository."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    metadata = tmp_path / "hotswap-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hotswap\nVersion: 0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (metadata / "entry_points.txt").write_text(f"[pytest11]\n{lines}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--hotswap-seed=1", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "tests/unit/test_plugin_faults.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


SUITE_WITHOUT_PLUGIN = """
from hotswap.core.testing.suites import VictimSuite

class TestMine(VictimSuite):
    pass
"""


def test_a_suite_without_a_plugin_says_so(author_runs: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    result = author_runs(SUITE_WITHOUT_PLUGIN, "-k", "only_candidate")
    assert "TestMine: set `plugin` to the module of your plugin" in result.stdout


def test_base_classes_are_not_collected(author_runs: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    result = author_runs("from hotswap.core.testing.suites import ConformanceSuite, VictimSuite\n")
    assert "no tests ran" in result.stdout


def test_seed_draws_other_examples(author_runs: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    source = (
        "from hypothesis import strategies as st\n"
        "from hotswap.core.testing.suites import VictimSuite\n"
        "class TestMine(VictimSuite):\n"
        "    plugin = 'hotswap.plugins.schedulers.victims.newest'\n"
        "    def test_drawn(self):\n"
        "        drawn = []\n"
        "        self.for_all(10, lambda number: drawn.append(number), number=st.integers(0, 10**9))\n"
        "        print('DRAWN', drawn)\n"
    )

    def drawn(*flags: str) -> str:
        out = author_runs(source, "-k", "drawn", "-s", *flags).stdout
        return out.split("DRAWN")[1].splitlines()[0]

    assert drawn() == drawn() != drawn("--hotswap-seed=1")
