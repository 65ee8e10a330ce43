"""The built-in executor keeps its contract."""

from __future__ import annotations

from hotswap.core.testing.suites import ExecutorSuite


class TestInProcess(ExecutorSuite):
    plugin = "hotswap.plugins.executors.in_process"
