"""The built-in scheduler keeps its contract."""

from __future__ import annotations

from hotswap.core.testing.suites import SchedulerSuite


class TestContinuousBatching(SchedulerSuite):
    plugin = "hotswap.plugins.schedulers.continuous_batching"
