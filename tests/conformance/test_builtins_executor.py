"""The built-in executors keep their contract."""

from __future__ import annotations

from hotswap.core.contracts import DeviceInfo
from hotswap.core.testing.suites import ExecutorSuite


class TestInProcess(ExecutorSuite):
    plugin = "hotswap.plugins.executors.in_process"


class TestInProcessBeforeADevice(ExecutorSuite):
    plugin = "hotswap.plugins.executors.in_process"
    asynchronous = True


class TestInline(ExecutorSuite):
    plugin = "hotswap.plugins.executors.inline"
    asynchronous = True
    device = DeviceInfo(kind="cuda", name="a device that works asynchronously")
