"""The built-in policies keep their contract."""

from __future__ import annotations

from hotswap.core.testing.suites import PolicySuite


class TestFcfs(PolicySuite):
    plugin = "hotswap.plugins.schedulers.policies.fcfs"


class TestPriority(PolicySuite):
    plugin = "hotswap.plugins.schedulers.policies.priority"
