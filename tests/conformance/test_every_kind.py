"""Every kind has a suite, a template and broken samples, and every built-in provider goes through its kind's suite."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hotswap.core.contracts.kinds import KINDS
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.plugin_registry import Registered
from hotswap.core.testing.broken import broken_samples
from hotswap.core.testing.finding import offered_by
from hotswap.core.testing.suites import __all__ as exported
from hotswap.core.testing.suites import class_name, suite_of
from hotswap.core.testing.suites.base import ConformanceSuite
from hotswap.plugins import BUILTIN_PLUGINS

FOLDER = Path(__file__).parent
MIN_SAMPLES = 3

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_suite(kind: str) -> None:
    suite = suite_of(kind)
    assert issubclass(suite, ConformanceSuite)
    assert suite.kind == kind
    assert class_name(kind) in exported
    own = [name for name in vars(suite) if name.startswith("test_")]
    assert len(own) >= MIN_SAMPLES
    for name in own:
        assert getattr(suite, name).__doc__, f"{suite.__name__}.{name}: a docstring says which rule it checks"


@every_kind
def test_template(kind: str) -> None:
    offered = offered_by(f"hotswap.core.testing.templates.{kind}")
    assert {(found.kind, found.name) for found in offered} == {(kind, f"my_{kind}")}


@every_kind
def test_broken_samples(kind: str) -> None:
    samples = broken_samples(kind)
    assert len(samples) >= MIN_SAMPLES
    assert len({sample.name for sample in samples}) == len(samples)
    checks = [name for name in dir(suite_of(kind)) if name.startswith("test_")]
    for sample in samples:
        assert any(sample.caught_by in name for name in checks), f"{sample.name}: no check is called {sample.caught_by}"


def covered(kind: str) -> tuple[list[type[ConformanceSuite]], list[str]]:
    """The classes of test_builtins_KIND.py and of test_builtins_*_KIND.py, and why files of these cannot run here."""
    classes, skipped = [], []
    for path in sorted([*FOLDER.glob(f"test_builtins_{kind}.py"), *FOLDER.glob(f"test_builtins_*_{kind}.py")]):
        spec = importlib.util.spec_from_file_location(f"read_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except pytest.skip.Exception as reason:
            skipped.append(f"{path.name}: {reason}")
            continue
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, suite_of(kind)) and value.__name__.startswith("Test"):
                classes.append(value)
    return classes, skipped


def builtins() -> list[Registered]:
    manager = PluginManager(builtins=BUILTIN_PLUGINS)
    manager.load()
    return [found for kind in KINDS for found in manager.providers(kind) if found.builtin]


@pytest.mark.parametrize("found", builtins(), ids=lambda found: f"{found.kind}-{found.op or ''}{found.name}")
def test_builtin_goes_through_its_suite(found: Registered) -> None:
    # A class that leaves `name` or `op` out although its module offers several fails by itself.
    classes, skipped = covered(found.kind)
    own = [cls for cls in classes if cls.plugin == found.module]
    mine = [cls for cls in own if cls.name in ("", found.name) and cls.op in (None, found.op)]
    if not mine and skipped:
        pytest.skip("; ".join(skipped))
    assert mine, f"tests/conformance/test_builtins_{found.kind}.py has no class for {found.described}"
