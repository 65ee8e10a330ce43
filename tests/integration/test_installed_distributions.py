"""What the operator reads when installed distributions do not go together: really installed ones (wheels, by pip), and the
real command in a process of its own. What a plugin does when all is well is in test_outside_plugin.py."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "import sys; from hotswap.server.cli import main; sys.exit(main(sys.argv[1:]))"
POLICY = """
from typing import Literal

from pydantic import BaseModel, Field

from hotswap.core.contracts import KeyedPolicy, PolicyProvider, hookimpl
from hotswap.core.contracts.provider import CompatibilityRow

class Policy(KeyedPolicy):
    def key(self, view):
        return 0

class Options(BaseModel):
    weight: float = Field(1.0, gt=0)
    mode: Literal["fast", "fair"] = "fair"
    limit: int = 8

@hookimpl
def hotswap_policy():
    yield PolicyProvider(
        name="{name}",
        build=lambda context: Policy(),
        contract={contract},
        options=Options,
        combines=({combines}),
    )
"""
COMBINES = (
    'CompatibilityRow("policy=loner", "prefix_caching", False, '
    '"--plugin policy=loner with prefix caching: it counts every token; use --no-enable-prefix-caching"),'
)
BROKEN = """
def read_the_clock():
    raise ValueError("no clock in this building")

try:
    read_the_clock()
except ValueError as error:
    raise ImportError("cannot start") from error
"""


def wheel(folder: Path, name: str, version: str, code: str) -> Path:
    """A wheel of one module with one entry point."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[hotswap]\n{module} = {module}\n",
    }
    record = ""
    for file, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{file},sha256={digest},{len(text.encode())}\n"
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(file, text)
    return path


def policy(name: str, contract: int = 1, combines: str = "") -> str:
    return POLICY.format(name=name, contract=contract, combines=combines)


class Installed:
    """A folder of installed distributions, and the command in a process that sees them."""

    def __init__(self, folder: Path, *wheels: Path) -> None:
        self.folder = folder / "site"
        options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(self.folder), *map(str, wheels)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert result.returncode == 0, result.stderr

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(self.folder)])}
        return subprocess.run(
            [sys.executable, "-c", COMMAND, *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def refusal(self, *words: str) -> str:
        """The one line of a command that must end with status 2."""
        result = self.run(*words)
        assert result.returncode == 2, result.stderr
        assert "Traceback" not in result.stderr and result.stdout == ""
        errors = [line for line in result.stderr.splitlines() if line.startswith("hotswap: error: ")]
        assert len(errors) == 1 and result.stderr.splitlines()[-1] == errors[0]
        return errors[0].removeprefix("hotswap: error: ")

    def rows(self, *words: str) -> dict[tuple[str, str], dict[str, object]]:
        """(name, distribution) -> row of the inventory."""
        result = self.run("plugins", "--json", *words)
        assert result.returncode == 0, result.stderr
        return {(row["name"], row["distribution"]): row for row in json.loads(result.stdout)}


@pytest.fixture(scope="module")
def clash(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("clash")
    left = wheel(folder, "acme-left", "1.2", policy("same"))
    return Installed(folder, left, wheel(folder, "acme-right", "3.4", policy("same")))


@pytest.fixture(scope="module")
def assorted(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("assorted")
    return Installed(
        folder,
        wheel(folder, "acme-future", "0.9", policy("future", contract=9)),
        wheel(folder, "acme-past", "0.1", policy("past", contract=0)),
        wheel(folder, "acme-broken", "2.0", BROKEN),
        wheel(folder, "acme-picky", "5.1", policy("picky")),
        wheel(folder, "acme-loner", "1.0", policy("loner", combines=COMBINES)),
    )


# Two distributions that offer the same kind and name.


def test_a_clash_is_refused_naming_both(clash: Installed) -> None:
    message = clash.refusal("serve", "./no-such-model")
    assert message == (
        "policy 'same' is offered by acme-left 1.2 and acme-right 3.4; "
        "keep one with --plugin no:acme-left or --plugin no:acme-right"
    )


def test_a_clash_is_shown_by_the_inventory(clash: Installed) -> None:
    rows = clash.rows()
    for distribution in ("acme-left", "acme-right"):
        row = rows["same", distribution]
        assert row["state"] == "failed" and "acme-left 1.2 and acme-right 3.4" in str(row["reasons"])


@pytest.mark.parametrize(("blocked", "kept"), [("acme-left", "acme-right"), ("acme-right", "acme-left")])
def test_a_block_resolves_the_clash(clash: Installed, blocked: str, kept: str) -> None:
    rows = clash.rows("--plugin", f"no:{blocked}", "--plugin", "policy=same")
    assert rows["same", kept]["state"] == "active"
    assert {row["state"] for (_, distribution), row in rows.items() if distribution == blocked} == {"blocked"}


def test_with_the_block_a_start_goes_on(clash: Installed) -> None:
    result = clash.run("serve", "./no-such-model", "--port", "0", "--plugin", "no:acme-left", "--plugin", "policy=same")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "hotswap: error: ./no-such-model: no such file or folder"


# Contract versions outside the range.


@pytest.mark.parametrize(("name", "version", "contract"), [("future", "0.9", 9), ("past", "0.1", 0)])
def test_a_contract_outside_the_range(assorted: Installed, name: str, version: str, contract: int) -> None:
    message = assorted.refusal("plugins", "--plugin", f"policy={name}")
    assert f"policy {name!r} of acme-{name} {version}: written for version {contract} of the policy contract" in message
    assert "this hotswap supports 1" in message and "docs/plugins/contracts.md#policy" in message


def test_a_contract_outside_the_range_is_rejected_in_the_inventory(assorted: Installed) -> None:
    rows = assorted.rows()
    assert rows["future", "acme-future"]["state"] in ("rejected", "failed")
    assert "version 9" in str(rows["future", "acme-future"]["reasons"])
    assert rows["picky", "acme-picky"]["state"] == "available"


# A failing import.

CAUSE = "plugin 'acme_broken' of acme-broken 2.0 failed to import: "


def test_a_failing_import_that_nobody_asked_for_is_one_warning(assorted: Installed) -> None:
    result = assorted.run("serve", "./no-such-model", "--port", "0")
    assert result.returncode == 1  # the model's fault, not the plugin's
    lines = [line for line in result.stderr.splitlines() if "acme-broken" in line]
    assert len(lines) == 1 and CAUSE in lines[0] and "no clock in this building" in lines[0]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("words", [["--strict-plugins"], ["--plugin", "acme-broken"], ["--plugin", "acme_broken"]])
def test_a_failing_import_is_fatal_when_strict_or_asked_for(assorted: Installed, words: list[str]) -> None:
    message = assorted.refusal("plugins", *words)
    assert CAUSE in message and "ValueError: no clock in this building" in message


# Bad options.


def test_every_bad_option_is_named(assorted: Installed) -> None:
    message = assorted.refusal("plugins", "--plugin", "policy=picky,weight=0,mode=slow,limit=many")
    assert message.startswith("policy 'picky' of acme-picky 5.1: ")
    for part in (
        "option 'weight': should be greater than 0, got 0",
        "option 'mode': should be 'fast' or 'fair', got 'slow'",
        "option 'limit': should be a valid integer",
    ):
        assert part in message
    assert message.endswith("(--plugin policy=picky,weight=0,mode=slow,limit=many, command line)")


def test_a_misspelt_option_gets_the_nearest_one(assorted: Installed, tmp_path: Path) -> None:
    file = tmp_path / "hotswap.yaml"
    file.write_text("plugin: ['policy=picky,wieght=2']\n")
    message = assorted.refusal("plugins", "--config", str(file))
    assert "policy 'picky' of acme-picky 5.1 has no option 'wieght'; did you mean 'weight'?" in message
    assert "config file" in message


# A combination that a plugin's row forbids.


def test_an_unsupported_combination(assorted: Installed) -> None:
    message = assorted.refusal("serve", "./no-such-model", "--plugin", "policy=loner")
    assert "--plugin policy=loner with prefix caching: it counts every token; use --no-enable-prefix-caching" in message
    result = assorted.run(
        "serve", "./no-such-model", "--port", "0", "--plugin", "policy=loner", "--no-enable-prefix-caching"
    )
    assert result.returncode == 1 and "no such file or folder" in result.stderr
