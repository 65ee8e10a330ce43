"""The built-in policies keep their contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hotswap.core.testing.suites import PolicySuite


class TestFcfs(PolicySuite):
    plugin = "hotswap.plugins.schedulers.policies.fcfs"


class TestPriority(PolicySuite):
    plugin = "hotswap.plugins.schedulers.policies.priority"


class TestLongestPrefix(PolicySuite):
    plugin = "hotswap.plugins.schedulers.policies.longest_prefix"


class TestShortestFirst(PolicySuite):
    plugin = "hotswap.plugins.schedulers.policies.shortest_first"


class TestMlfq(PolicySuite):
    plugin = "hotswap.plugins.schedulers.policies.mlfq"


class TestMlfqWithShortQuanta(PolicySuite):
    """So short that requests of these tests sink, and give way to one another."""

    plugin = "hotswap.plugins.schedulers.policies.mlfq"
    options: ClassVar[Mapping[str, Any]] = {
        "quantum": 2.0,
        "levels": 4,
        "prompt_weight": 1.0,
        "promote_after_seconds": 3.0,
    }


class TestFairShare(PolicySuite):
    plugin = "hotswap.plugins.schedulers.policies.fair_share"


class TestDeadline(PolicySuite):
    """So tight that requests of these tests are refused once the time of a prefill is known."""

    plugin = "hotswap.plugins.schedulers.policies.deadline"
    options: ClassVar[Mapping[str, Any]] = {"ttft_seconds": 0.75, "tpot_seconds": 0.5}
