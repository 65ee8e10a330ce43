from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Iterable
from typing import Any

import pluggy
import pytest

from hotswap.core import hookspecs
from hotswap.core.clock import ManualClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.policy import Budget, PolicyContext, PolicyProvider, RequestView, Shed
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.contracts.scheduler import SchedulerContext
from hotswap.core.contracts.victim import VictimContext
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.plugins.schedulers import continuous_batching
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies import fcfs, priority
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.policies.priority import Priority
from hotswap.plugins.schedulers.victims import lowest_priority, newest
from hotswap.plugins.schedulers.victims.lowest_priority import LowestPriority
from hotswap.plugins.schedulers.victims.newest import Newest

COMMON: dict[str, Any] = {
    "options": None,
    "config": EngineConfig.from_flat(),
    "device": DeviceInfo(kind="cpu", name="test"),
    "clock": ManualClock(),
    "logger": logging.getLogger("test"),
}


def serve(policy: Fcfs | Priority, rows: Iterable[tuple[int, int, float]]) -> list[int]:
    for request_id, priority_class, arrival_time in rows:
        policy.push(fake_request(request_id, priority=priority_class, arrival_time=arrival_time))
    served = []
    while (head := policy.peek()) is not None:
        assert policy.pop() is head
        served.append(head.request_id)
    assert len(policy) == 0
    return served


ROWS = [(0, 1, 5.0), (1, 0, 6.0), (2, 1, 4.0), (3, 0, 6.0), (4, -1, 9.0)]


def test_fcfs_serves_by_arrival() -> None:
    assert serve(Fcfs(), ROWS) == [2, 0, 1, 3, 4]


def test_priority_serves_by_class_then_arrival() -> None:
    assert serve(Priority(), ROWS) == [4, 1, 3, 2, 0]


@pytest.mark.parametrize("policy_class", [Fcfs, Priority])
def test_removed_requests_are_not_served(policy_class: type[Fcfs]) -> None:
    policy = policy_class()
    requests = [fake_request(i, priority=i % 3) for i in range(30)]
    order = list(requests)
    random.Random(3).shuffle(order)
    for request in order:
        policy.push(request)
    for i in range(0, 30, 2):
        policy.remove(i)
    with pytest.raises(KeyError):
        policy.remove(0)
    assert len(policy) == 15
    assert {view.request_id for view in policy.waiting()} == set(range(1, 30, 2))
    served = [policy.pop().request_id for _ in range(15)]
    assert served == [r.request_id for r in sorted(requests[1::2], key=policy.key)]
    with pytest.raises(IndexError):
        policy.pop()


def test_victims() -> None:
    candidates = [fake_request(i, priority=p, arrival_time=t) for i, p, t in ROWS]
    assert Newest().choose(candidates, 1).request_id == 4
    assert LowestPriority().choose(candidates, 1).request_id == 0
    twins = [fake_request(i, arrival_time=1.0) for i in range(3)]
    assert Newest().choose(twins, 1).request_id == LowestPriority().choose(twins, 1).request_id == 2


def test_providers() -> None:
    manager = pluggy.PluginManager("hotswap")
    manager.add_hookspecs(hookspecs)
    for module in (continuous_batching, fcfs, priority, newest, lowest_priority):
        manager.register(module)
    manager.check_pending()
    policies = {p.name: p for found in manager.hook.hotswap_policy() for p in found}
    victims = {p.name: p for found in manager.hook.hotswap_victim() for p in found}
    schedulers = {p.name: p for found in manager.hook.hotswap_scheduler() for p in found}
    assert set(policies) == {"fcfs", "priority"}
    assert set(victims) == {"newest", "lowest_priority"}
    assert set(schedulers) == {"continuous_batching"}
    assert isinstance(policies["priority"], PolicyProvider)
    assert {p.default_victim for p in policies.values()} == set(victims)
    assert all(
        p.summary and not p.unavailable(None) for p in [*policies.values(), *victims.values(), *schedulers.values()]
    )
    policy = policies["fcfs"].build(PolicyContext(**COMMON))
    victim = victims["newest"].build(VictimContext(**COMMON))
    assert isinstance(policy, Fcfs)
    assert isinstance(victim, Newest)
    mechanism = SchedulingHarness(lambda m: ContinuousBatching(m, policy, victim), policy).mechanism
    scheduler = schedulers["continuous_batching"].build(
        SchedulerContext(**COMMON, mechanism=mechanism, policy=policy, victim=victim)
    )
    assert isinstance(scheduler, ContinuousBatching)
    assert (scheduler.mechanism, scheduler.policy, scheduler.victim) == (mechanism, policy, victim)


@pytest.mark.parametrize(
    "name", ["continuous_batching", "policies.fcfs", "policies.priority", "victims.newest", "victims.lowest_priority"]
)
def test_plugins_use_the_door_that_third_parties_use(name: str) -> None:
    module = importlib.import_module(f"hotswap.plugins.schedulers.{name}")
    origins = {getattr(value, "__module__", "") for value in vars(module).values()}
    ours = {origin for origin in origins if origin.startswith("hotswap.core")}
    assert ours
    assert all(origin.startswith("hotswap.core.contracts") for origin in ours)


class Halves(Fcfs):
    """Nobody gets more than half of what is left; counts what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduled: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self.finished: list[int] = []

    def share(self, view: RequestView, budget: Budget) -> int:
        return max(1, budget.num_tokens // 2)

    def on_scheduled(self, view: RequestView, num_tokens: int) -> None:
        self.scheduled[view.request_id] = self.scheduled.get(view.request_id, 0) + num_tokens

    def on_tokens(self, view: RequestView, num_tokens: int) -> None:
        self.tokens[view.request_id] = self.tokens.get(view.request_id, 0) + num_tokens

    def on_finish(self, view: RequestView) -> None:
        self.finished.append(view.request_id)


def test_shares_are_kept_and_policies_are_told() -> None:
    policy = Halves()
    harness = SchedulingHarness(lambda m: ContinuousBatching(m, policy, Newest()), policy, max_num_batched_tokens=16)
    for i in range(2):
        harness.add(fake_request(i, [i] * 10, max_tokens=3))
    plan = harness.schedule()
    assert plan is not None
    assert [row.num_tokens for row in plan.scheduled] == [8, 4]
    harness.drain()
    assert policy.scheduled == {0: 12, 1: 12}
    assert policy.tokens == {0: 3, 1: 3}
    assert sorted(policy.finished) == [0, 1]


class Shedding(Fcfs):
    """Gives up on requests of class 9."""

    uses_priority = True

    def shed(self) -> Iterable[Shed]:
        return [Shed(view.request_id, "too busy", 503) for view in self.waiting() if view.priority == 9]


def test_shed_requests_end_with_the_policys_words() -> None:
    policy = Shedding()
    harness = SchedulingHarness(lambda m: ContinuousBatching(m, policy, Newest()), policy)
    for i in range(3):
        harness.add(fake_request(i, [i] * 3, max_tokens=2, priority=9 if i == 1 else 0))
    harness.drain()
    ended = harness.ended[1]
    assert (ended.finish_reason, ended.error, ended.error_status, ended.token_ids) == ("error", "too busy", 503, [])
    assert all(harness.ended[i].token_ids == harness.expected_tokens(i) for i in (0, 2))


def test_lowest_priority_yields_first() -> None:
    policy = Priority()
    harness = SchedulingHarness(
        lambda m: ContinuousBatching(m, policy, LowestPriority()), policy, num_blocks=10, max_num_batched_tokens=64
    )
    for i, priority_class in enumerate([0, 5, 1]):
        harness.add(fake_request(i, [i] * 7, max_tokens=12, priority=priority_class))
    harness.drain()
    assert [harness.requests[i].num_preemptions > 0 for i in range(3)] == [False, True, False]
    assert list(harness.ended) == [0, 2, 1]
