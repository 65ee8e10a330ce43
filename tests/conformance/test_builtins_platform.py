"""The built-in platforms keep their contract; of those for cards, what needs none is checked everywhere."""

from __future__ import annotations

from hotswap.core.testing.suites import PlatformSuite


class TestCpu(PlatformSuite):
    plugin = "hotswap.plugins.hardware.cpu"


class TestCuda(PlatformSuite):
    plugin = "hotswap.plugins.hardware.cuda"


class TestRocm(PlatformSuite):
    plugin = "hotswap.plugins.hardware.rocm"
