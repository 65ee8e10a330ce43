"""Policies swapped at any step, under load, on the real mechanism: the same tokens as without, and no block out of place."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hotswap.core.clock import ManualClock
from hotswap.core.contracts.policy import Budget, KeyedPolicy, Policy, RequestView
from hotswap.core.contracts.victim import VictimRule
from hotswap.core.errors import PlanError
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.deadline import Deadline, DeadlineOptions
from hotswap.plugins.schedulers.policies.fair_share import FairShare, FairShareOptions
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.policies.longest_prefix import LongestPrefix, LongestPrefixOptions
from hotswap.plugins.schedulers.policies.mlfq import Mlfq, MlfqOptions
from hotswap.plugins.schedulers.policies.priority import Priority
from hotswap.plugins.schedulers.policies.shortest_first import ShortestFirst, ShortestFirstOptions
from hotswap.plugins.schedulers.victims.fewest_blocks_lost import FewestBlocksLost
from hotswap.plugins.schedulers.victims.lowest_priority import LowestPriority
from hotswap.plugins.schedulers.victims.newest import Newest


class Shortest(KeyedPolicy):
    """Shares a little to each, and follows what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[int, int] = {}

    def key(self, view: RequestView) -> int:
        return view.num_prompt_tokens

    def share(self, view: RequestView, budget: Budget) -> int:
        return 3

    def on_scheduled(self, view: RequestView, num_tokens: int) -> None:
        self.running[view.request_id] = self.running.get(view.request_id, 0) + num_tokens

    def on_finish(self, view: RequestView) -> None:
        self.running.pop(view.request_id, None)


POLICIES: list[Callable[[], Policy]] = [
    Fcfs,
    Priority,
    Shortest,
    lambda: LongestPrefix(LongestPrefixOptions(window=3, lookups_per_step=2), ManualClock(20.0).now),
    lambda: ShortestFirst(ShortestFirstOptions()),
    lambda: Mlfq(MlfqOptions(quantum=2.0, prompt_weight=1.0), ManualClock(20.0).now),
    lambda: FairShare(FairShareOptions(weights={"alice": 2.0})),
    lambda: Deadline(DeadlineOptions(ttft_seconds=50.0), ManualClock(20.0).now),
]
VICTIMS: list[Callable[[], VictimRule]] = [Newest, LowestPriority, lambda: FewestBlocksLost(4)]


def run(seed: int, swaps: bool, num_blocks: int) -> dict[int, list[int]]:
    load, chance = random.Random(seed), random.Random(seed + 1)
    policy: Policy = Fcfs()
    harness = SchedulingHarness(
        lambda m: ContinuousBatching(m, policy, Newest()), policy, num_blocks=num_blocks, max_num_seqs=3
    )
    aborted = set()
    for request_id in range(12):
        prompt = [load.randrange(5) for _ in range(load.randrange(1, 20))]
        fields = {
            "priority": load.randrange(3),
            "max_tokens": load.randrange(1, 12),
            "user": load.choice(("", "alice", "bob")),
        }
        harness.add(fake_request(request_id, prompt, **fields))  # type: ignore[arg-type]
        for _ in range(chance.randrange(3)):
            (harness.schedule if chance.random() < 0.5 else harness.confirm)()
        if load.random() < 0.1:
            harness.abort(request_id)
            aborted.add(request_id)
        if swaps:
            swap(harness, chance)
    while harness.mechanism.num_unfinished or harness.executor.num_in_flight:
        (harness.schedule if chance.random() < 0.5 else harness.confirm)()
        if swaps and chance.random() < 0.3:
            swap(harness, chance)
        if not harness.executor.num_in_flight:
            harness.schedule()
    harness.check_whole()
    for request_id in set(harness.ended) - aborted:
        assert harness.ended[request_id].token_ids == harness.expected_tokens(request_id)
    assert len(harness.ended) == 12
    return {request_id: harness.ended[request_id].token_ids for request_id in sorted(set(harness.ended) - aborted)}


def swap(harness: SchedulingHarness, chance: random.Random) -> None:
    policy = chance.choice(POLICIES)()
    harness.mechanism.policy = policy
    harness.scheduler.policy = policy
    harness.scheduler.victim = chance.choice(VICTIMS)()
    harness.mechanism.check_integrity()
    keys = [(r.priority, r.arrival_time, r.request_id) for r in harness.mechanism.running]
    assert keys == sorted(keys)
    if not policy.uses_priority:
        assert all(view.priority == 0 for view in [*policy.waiting(), *harness.mechanism.running])
    harness._first = (-1, -1, -1)  # service order may have changed: who is protected starts anew


@pytest.mark.parametrize("num_blocks", [12, 16, 60])
def test_no_token_is_lost_or_repeated(num_blocks: int) -> None:
    for seed in range(12):
        assert run(seed, True, num_blocks) == run(seed, False, num_blocks), f"seed {seed}"


class LosesOne(Fcfs):
    def push(self, view: RequestView) -> None:
        if len(self) < 1:
            super().push(view)


class Full(Fcfs):
    def __init__(self) -> None:
        super().__init__()
        self.push(fake_request(99))


class RaisesLate(Priority):
    def push(self, view: RequestView) -> None:
        if len(self) == 2:
            raise OSError("late")
        super().push(view)


@pytest.mark.parametrize(
    ("make", "error"), [(LosesOne, PlanError), (Full, PlanError), (RaisesLate, OSError)], ids=lambda x: x.__name__
)
def test_a_swap_that_fails_changes_nothing(make: Callable[[], Policy], error: type[Exception]) -> None:
    policy = Fcfs()
    harness = SchedulingHarness(lambda m: ContinuousBatching(m, policy, Newest()), policy, max_num_seqs=1)
    for i in range(4):
        harness.add(fake_request(i, priority=3 - i, max_tokens=4))
    harness.step()
    with pytest.raises(error):
        harness.mechanism.policy = make()
    assert harness.mechanism.policy is policy and len(policy) == 3
    assert all(request.priority == 0 for request in harness.requests.values())
    harness.drain()
    assert list(harness.ended) == [0, 1, 2, 3]


def test_no_swap_while_a_plan_is_open() -> None:
    policy = Fcfs()
    harness = SchedulingHarness(lambda m: ContinuousBatching(m, policy, Newest()), policy)
    builder = harness.mechanism.begin_plan()
    with pytest.raises(PlanError, match="while a plan is being built"):
        harness.mechanism.policy = Fcfs()
    builder.build()
    harness.mechanism.policy = Fcfs()
