"""The built-in victim rules keep their contract."""

from __future__ import annotations

from hotswap.core.testing.suites import VictimSuite


class TestNewest(VictimSuite):
    plugin = "hotswap.plugins.schedulers.victims.newest"


class TestLowestPriority(VictimSuite):
    plugin = "hotswap.plugins.schedulers.victims.lowest_priority"


class TestFewestBlocksLost(VictimSuite):
    plugin = "hotswap.plugins.schedulers.victims.fewest_blocks_lost"
