"""The built-in observers keep their contract."""

from __future__ import annotations

from hotswap.core.testing.suites import ObserverSuite


class TestTrace(ObserverSuite):
    plugin = "hotswap.plugins.observers.trace"
    options = {"path": "/dev/null"}
