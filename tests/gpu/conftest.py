"""Everything in this folder needs a GPU that torch can use; elsewhere it is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from speed_figures import SPEED_LINES

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch finds no GPU here (torch.cuda.is_available() is false)"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The figures of test_gpu_speed.py, where it ran."""
    if lines := config.stash.get(SPEED_LINES, None):
        terminalreporter.section("speed")
        terminalreporter.write_line("\n".join(lines))


@pytest.fixture(scope="session", autouse=True)
def _shown_device(request: pytest.FixtureRequest) -> None:
    """Says once which device the tests ran on."""
    if not torch.cuda.is_available():
        return
    facts = torch.cuda.get_device_properties(0)
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        size = facts.total_memory / 2**30
        reporter.write_line(f"device: {facts.name}, {size:.0f} GiB, capability {facts.major}.{facts.minor}")
