"""The built-in platform keeps its contract."""

from __future__ import annotations

from hotswap.core.testing.suites import PlatformSuite


class TestCpu(PlatformSuite):
    plugin = "hotswap.plugins.hardware.cpu"
