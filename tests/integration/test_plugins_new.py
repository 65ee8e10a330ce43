"""`hotswap plugins new KIND NAME`: what it writes is a plugin that keeps its contract, for every kind."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hotswap.core.contracts.kinds import KINDS
from hotswap.core.testing.suites import class_name
from hotswap.server.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
INSTALLED_KIND = "policy"
GENERIC = "name_is_lower_case or hook_yields_equal"

every_kind = pytest.mark.parametrize("kind", KINDS)


def name_of(kind: str) -> str:
    return f"trial_{kind}"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One package of each kind."""
    parent = tmp_path_factory.mktemp("packages")
    for kind in KINDS:
        assert main(["plugins", "new", kind, name_of(kind), "--dir", str(parent)]) == 0
    return {kind: parent / f"hotswap-trial-{kind.replace('_', '-')}" for kind in KINDS}


def python(*words: str, path: list[Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT / "src", *path]))}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=200)


@pytest.fixture(scope="module")
def own_tests(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Every package's own test, in one process: its outcomes by kind. Here the checks that all kinds share; the rest
    of the suite runs in `test_check_passes`.
    """
    report = tmp_path_factory.mktemp("report") / "report.xml"
    flags = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", f"--junit-xml={report}", "-k", GENERIC]
    folders = [str(folder / "tests") for folder in packages.values()]
    path = [folder / "src" for folder in packages.values()]
    result = python("-m", "pytest", *flags, *folders, path=path, cwd=report.parent)
    assert report.exists(), result.stdout + result.stderr
    outcomes: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for case in ElementTree.parse(report).iter("testcase"):
        for kind in KINDS:  # none for a module that cannot be imported: then nothing of its kind has run
            if f"Test{class_name(name_of(kind), '')}" in str(case.get("classname")):
                outcomes[kind] += [child.tag for child in case if child.tag in ("failure", "error")] or ["ran"]
    return outcomes


@every_kind
def test_package_is_complete(kind: str, packages: dict[str, Path]) -> None:
    folder, name = packages[kind], name_of(kind)
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert files == {"README.md", "pyproject.toml", f"src/hotswap_{name}.py", "tests/test_conformance.py"}
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["hotswap"] == {name: f"hotswap_{name}"}
    for file in files:
        text = (folder / file).read_text()
        assert not re.search(r"\bmy_|\bMy[A-Z]|{\w+}", re.sub(r"f\".*?\"", "", text)), (
            f"{file}: something of the template"
        )
        if file.endswith(".py"):
            ast.parse(text)
    assert f"--plugin {kind}={name}" in (folder / "README.md").read_text()


QUICK_KINDS = ("policy", "observer", "logits_processor", "tool_parser")  # the templates of all run in tests/conformance


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK_KINDS else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]
)
def test_check_passes(kind: str, packages: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    file = packages[kind] / "src" / f"hotswap_{name_of(kind)}.py"
    status = main(["plugins", "check", f"{kind}={name_of(kind)}", "--plugin", str(file)])
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.splitlines()[-1].endswith(f"{name_of(kind)} keeps the {kind} contract")


@every_kind
def test_own_test_passes(kind: str, own_tests: dict[str, list[str]]) -> None:
    assert own_tests[kind]
    assert set(own_tests[kind]) == {"ran"}


def test_installed_package(packages: dict[str, Path], tmp_path: Path) -> None:
    """The way of the README: installed, found by its entry point, checked by name, its whole test run."""
    folder, name = packages[INSTALLED_KIND], name_of(INSTALLED_KIND)
    flags = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    site = tmp_path / "site"
    installed = python("-m", "pip", "install", *flags, "--target", str(site), str(folder), path=[], cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    call = "import sys; from hotswap.server.cli.main import main; sys.exit(main(sys.argv[1:]))"
    checked = python("-c", call, "plugins", "check", name, path=[site], cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.startswith(f"policy {name!r} of hotswap-trial-policy 0.1.0, contract 1\n")
    tested = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests"), path=[site], cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout
