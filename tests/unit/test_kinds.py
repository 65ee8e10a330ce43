"""The kind table, the hook page and the docs say the same thing."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hotswap
from hotswap.core import contracts, hookspecs
from hotswap.core.contracts.kinds import KINDS, Kind
from hotswap.core.contracts.provider import BuildContext, Provider
from hotswap.core.version import __version__

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
HOOKS_PAGE = ROOT / "docs" / "plugins" / "hooks.md"
CONTRACTS_PAGE = ROOT / "docs" / "plugins" / "contracts.md"

# Every callback of an observer is optional, so nothing of it is abstract.
WITHOUT_ABSTRACT_METHODS = {"observer"}

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def test_one_hook_for_each_kind() -> None:
    assert list(hookspecs.hook_names()) == [kind.hook for kind in KINDS.values()]


@every_kind
def test_hook_has_a_docstring_and_a_heading_with_its_signature(kind: Kind) -> None:
    hook = getattr(hookspecs, kind.hook)
    documentation = inspect.cleandoc(hook.__doc__)
    assert len(documentation) > 80
    assert not inspect.signature(hook).parameters
    page = HOOKS_PAGE.read_text()
    heading = f"## `{kind.hook}() -> {hook.__annotations__['return']}`"
    assert heading in page.splitlines()
    section = page.split(heading)[1].split("\n## ")[0].strip()
    assert section == documentation, f"docs/plugins/hooks.md differs from the docstring of {kind.hook}"


def test_no_heading_without_a_hook() -> None:
    headings = re.findall(r"^## `(\w+)\(", HOOKS_PAGE.read_text(), flags=re.M)
    assert headings == list(hookspecs.hook_names())


@every_kind
def test_classes_of_a_kind(kind: Kind) -> None:
    assert issubclass(kind.provider_class(), Provider)
    assert issubclass(kind.context_class(), BuildContext)
    product = kind.product_class("linear" if kind.ops() else None)
    assert inspect.isabstract(product) == (kind.name not in WITHOUT_ABSTRACT_METHODS)
    assert 1 <= kind.oldest_supported <= kind.current
    assert (kind.active == "one per op") == bool(kind.ops())
    assert (kind.default is not None) == (kind.chosen_by == "default")


@every_kind
def test_hook_yields_the_provider_class_of_the_table(kind: Kind) -> None:
    returned = getattr(hookspecs, kind.hook).__annotations__["return"]
    assert re.match(r"Iterable\[(\w+)", returned)[1] == kind.provider_class().__name__  # type: ignore[index]


@every_kind
def test_contracts_page_gives_the_versions(kind: Kind) -> None:
    page = CONTRACTS_PAGE.read_text()
    assert f"\n## {kind.name}\n" in page, kind.docs
    section = page.split(f"\n## {kind.name}\n")[1].split("\n## ")[0]
    assert f"| current version | {kind.current} |" in section
    assert f"| oldest supported version | {kind.oldest_supported} |" in section
    for version in range(1, kind.current + 1):
        assert f"Version {version}: " in section


def test_third_parties_take_part_in_these_automatic_choices_only() -> None:
    assert {kind.name for kind in KINDS.values() if kind.third_parties_automatic} == {
        "platform",
        "model",
        "loader",
        "quantization",
    }


@every_kind
def test_context_fields_with_defaults_break_nobody(kind: Kind) -> None:
    """The common fields stay optional but for the four that every context has."""
    common = {field.name for field in dataclasses.fields(BuildContext)}
    required = {
        field.name
        for field in dataclasses.fields(kind.context_class())
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    assert required & common == {"options", "config", "device", "clock"}


def test_everything_public_is_reexported() -> None:
    for kind in KINDS.values():
        for dotted in (kind.abstract, kind.provider, kind.context):
            assert dotted.partition(":")[2] in contracts.__all__
    assert sorted(contracts.__all__, key=str.lower) == list(contracts.__all__)
    assert all(hasattr(contracts, name) for name in contracts.__all__)


def test_reading_the_contracts_imports_nothing_heavy() -> None:
    code = (
        "import sys; from hotswap.core import contracts, hookspecs; from hotswap.core.contracts.kinds import KINDS\n"
        "[k.product_class(o) for k in KINDS.values() for o in (k.ops() or (None,))]\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'fastapi'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert result.stdout.strip() == "[]"


def test_one_version() -> None:
    assert hotswap.__version__ == __version__
