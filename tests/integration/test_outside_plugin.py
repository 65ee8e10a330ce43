"""Plugins from outside: real distributions, installed by pip into a throw-away folder, seen by fresh processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from hotswap.core.testing.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "hotswap-shortest-job"
FILE = ROOT / "examples" / "shortest_first_file.py"

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{name}"
version = "{version}"
[project.entry-points.hotswap]
{module} = "{module}"
[tool.setuptools]
py-modules = ["{module}"]
"""

POLICY = """
from hotswap.core.contracts import KeyedPolicy, PolicyProvider, hookimpl

class Policy(KeyedPolicy):
    def key(self, view):
        return 0

@hookimpl
def hotswap_policy():
    yield PolicyProvider(name="{name}", build=lambda context: Policy(), contract={contract})
"""

# Serves three requests, the longest first in the queue, one at a time, and prints the order in which they ended.
ORDER = """
import sys
from hotswap.core.clock import ManualClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts import DeviceInfo, PolicyContext, SchedulerContext, VictimContext
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.plugins import BUILTIN_PLUGINS

manager = PluginManager(builtins=BUILTIN_PLUGINS, selections=[("command line", value) for value in sys.argv[1:]])
manager.load()
common = dict(options=None, config=EngineConfig(), device=DeviceInfo("cpu", "test"), clock=ManualClock())
policy = manager.build("policy", PolicyContext(**common))
victim = manager.build("victim", VictimContext(**common))

def make(mechanism):
    return manager.build("scheduler", SchedulerContext(**common, mechanism=mechanism, policy=policy, victim=victim))

harness = SchedulingHarness(make, policy, max_num_seqs=1)
for request_id, num_tokens in enumerate((12, 7, 3)):
    prompt = range(100 * request_id, 100 * request_id + num_tokens)
    harness.add(fake_request(request_id, prompt=prompt, arrival_time=0.0, max_tokens=2))
harness.drain()
print(*harness.ended)
"""

# The same through a whole engine: three prompts at once into one seat, and the order in which they were finished.
LIVE_ORDER = """
import sys
from hotswap import LLM, SamplingParams

llm = LLM(sys.argv[1], plugins=sys.argv[2:], max_model_len=64, num_gpu_blocks_override=50, max_num_seqs=1)
ended, step = [], llm._engine.core.step

def watched():
    updates = step()
    ended.extend(update.request_id - 1 for update in updates if update.finish_reason is not None)
    return updates

llm._engine.core.step = watched
prompts = [{"prompt_token_ids": list(range(10, 10 + length))} for length in (30, 17, 5)]
llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
print(*ended)
"""


@dataclass(frozen=True)
class Environment:
    """A folder of installed distributions, for fresh processes."""

    folder: Path

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(self.folder)])}
        result = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert not check or result.returncode == 0, result.stderr
        return result

    def hotswap(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("-c", "import sys; from hotswap.server.cli import main; sys.exit(main())", *words, check=check)

    def refusal(self, *words: str) -> str:
        result = self.hotswap(*words, check=False)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
        line = result.stderr.splitlines()[-1]
        assert line.startswith("hotswap: error: ")
        return line.removeprefix("hotswap: error: ")

    def rows(self, *words: str) -> dict[str, dict[str, object]]:
        return {row["name"]: row for row in json.loads(self.hotswap("plugins", "--json", *words).stdout)}

    def order(self, *values: str) -> list[int]:
        return [int(word) for word in self.run("-c", ORDER, *values).stdout.split()]


def pip_install(folder: Path, *sources: Path) -> Environment:
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), *map(str, sources)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert result.returncode == 0, result.stderr
    return Environment(folder)


def distribution(where: Path, name: str, code: str, version: str = "1.0") -> Path:
    module = name.replace("-", "_")
    project = where / name
    project.mkdir(parents=True)
    (project / "pyproject.toml").write_text(PYPROJECT.format(name=name, version=version, module=module))
    (project / f"{module}.py").write_text(code)
    return project


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: a build leaves files behind."""
    return shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("sources") / EXAMPLE.name)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory, example: Path) -> Environment:
    """The example, a broken plugin and one written for a contract of the future."""
    sources = tmp_path_factory.mktemp("more")
    broken = distribution(sources, "hotswap-broken", "import a_missing_dependency\n", "0.2")
    future = distribution(sources, "hotswap-future", POLICY.format(name="future", contract=9))
    return pip_install(tmp_path_factory.mktemp("outside"), example, broken, future)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory, example: Path) -> Environment:
    """Two distributions that offer the same policy."""
    twin = distribution(
        tmp_path_factory.mktemp("twin"), "hotswap-twin", POLICY.format(name="shortest_job", contract=1), "3.1"
    )
    return pip_install(tmp_path_factory.mktemp("twins"), example, twin)


def test_the_example_is_small_and_has_one_entry_point() -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    assert project["project"]["entry-points"] == {"hotswap": {"shortest_job": "hotswap_shortest_job"}}
    lines = [len(path.read_text().splitlines()) for path in EXAMPLE.rglob("*.py")]
    assert len(lines) == 1
    assert lines[0] < 60


def test_installed_is_not_active(outside: Environment) -> None:
    row = outside.rows()["shortest_job"]
    assert row == {
        "kind": "policy",
        "name": "shortest_job",
        "distribution": "hotswap-shortest-job",
        "version": "1.0.0",
        "contract": 1,
        "state": "available",
        "reasons": [],
    }
    assert outside.rows("--plugin", "policy=shortest_job")["shortest_job"]["state"] == "active"


def test_it_changes_the_order_of_service(outside: Environment) -> None:
    assert outside.order() == [0, 1, 2]
    assert outside.order("policy=shortest_job") == [2, 1, 0]
    assert outside.order("shortest_job,patience=50") == [2, 1, 0]


def test_it_changes_the_order_of_service_of_a_running_engine(outside: Environment, tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path))

    def order(*values: str) -> list[int]:
        return [int(word) for word in outside.run("-c", LIVE_ORDER, model, *values).stdout.split()]

    assert order() == [0, 1, 2]
    assert order("policy=shortest_job") == [2, 1, 0]
    assert order(str(FILE)) == [2, 1, 0]


def test_a_single_file_does_the_same(outside: Environment) -> None:
    assert outside.order(str(FILE)) == [2, 1, 0]


def test_options_are_checked(outside: Environment) -> None:
    message = outside.refusal("plugins", "--plugin", "policy=shortest_job,patience=0")
    assert message == (
        "policy 'shortest_job' of hotswap-shortest-job 1.0.0: option 'patience': should be greater than 0, got 0 "
        "(--plugin policy=shortest_job,patience=0, command line)"
    )
    assert message in (EXAMPLE / "README.md").read_text().replace("hotswap serve ", "hotswap plugins ")
    misspelt = outside.refusal("plugins", "--plugin", "policy=shortest_job,patence=3")
    assert "has no option 'patence'; did you mean 'patience'? (options: output_weight, patience;" in misspelt


def test_a_broken_plugin_is_a_warning_until_it_is_asked_for(outside: Environment) -> None:
    cause = (
        "plugin 'hotswap_broken' of hotswap-broken 0.2 failed to import: "
        "ModuleNotFoundError: No module named 'a_missing_dependency'"
    )
    result = outside.hotswap("plugins", "--json")
    warnings = [line for line in result.stderr.splitlines() if "hotswap-broken" in line]
    assert warnings == [f"hotswap: warning: {cause}"]
    assert outside.rows()["hotswap_broken"]["state"] == "failed"
    assert cause in outside.refusal("plugins", "--plugin", "hotswap-broken")
    assert cause in outside.refusal("plugins", "--strict-plugins")
    blocked = outside.hotswap("plugins", "--json", "--plugin", "no:hotswap-broken")
    assert "a_missing_dependency" not in blocked.stderr


def test_a_contract_of_the_future(outside: Environment) -> None:
    message = outside.refusal("plugins", "--plugin", "policy=future")
    assert "policy 'future' of hotswap-future 1.0: written for version 9 of the policy contract" in message
    assert "this hotswap supports 1; what changed: docs/plugins/contracts.md#policy" in message


def test_two_distributions_of_one_name(twins: Environment) -> None:
    result = twins.run("-c", ORDER, check=False)
    assert result.returncode != 0
    expected = (
        "policy 'shortest_job' is offered by hotswap-shortest-job 1.0.0 and hotswap-twin 3.1; "
        "keep one with --plugin no:hotswap-shortest-job or --plugin no:hotswap-twin"
    )
    assert expected in result.stderr
    assert twins.order("no:hotswap-twin", "policy=shortest_job") == [2, 1, 0]
    assert twins.order("no:hotswap-shortest-job", "policy=shortest_job") == [0, 1, 2]
    rows = json.loads(twins.hotswap("plugins", "--json").stdout)
    assert [row["state"] for row in rows if row["name"] == "shortest_job"] == ["failed", "failed"]


def test_a_process_that_lacks_the_plugin_names_it(outside: Environment, tmp_path: Path) -> None:
    freeze = (
        "import sys, pathlib, msgspec; from hotswap.core.plugin_manager import PluginManager\n"
        "from hotswap.plugins import BUILTIN_PLUGINS\n"
        "m = PluginManager(builtins=BUILTIN_PLUGINS, selections=[('command line', v) for v in sys.argv[2:]])\n"
        "m.load()\n"
        "pathlib.Path(sys.argv[1]).write_bytes(msgspec.msgpack.encode(m.frozen()))"
    )
    thaw = (
        "import sys, pathlib, msgspec; from hotswap.core.plugin_manager import FrozenPlugins, PluginManager\n"
        "frozen = msgspec.msgpack.decode(pathlib.Path(sys.argv[1]).read_bytes(), type=FrozenPlugins)\n"
        "print([s.name for s in PluginManager.from_frozen(frozen).named('policy')])"
    )
    message = str(tmp_path / "frozen")
    outside.run("-c", freeze, message, "policy=shortest_job", "no:hotswap-future")
    assert outside.run("-c", thaw, message).stdout == "['shortest_job']\n"
    elsewhere = Environment(tmp_path).run("-c", thaw, message, check=False)
    assert "plugin 'shortest_job' of hotswap-shortest-job 1.0.0 was chosen" in elsewhere.stderr.splitlines()[-1]
    assert "is not installed" in elsewhere.stderr.splitlines()[-1]
