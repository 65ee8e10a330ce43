"""What a step costs in Python: O(running), never O(context), never O(waiting). Ratios and counts, so that a slow
machine passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from hotswap.core.clock import ManualClock
from hotswap.core.contracts.plan import RowResult, StepPlan, StepResult
from hotswap.core.contracts.policy import Policy
from hotswap.core.kv_cache import KVCacheManager
from hotswap.core.scheduling.limits import SchedulingLimits
from hotswap.core.scheduling.mechanism import Mechanism
from hotswap.core.testing.scheduling_harness import fake_request
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.deadline import Deadline, DeadlineOptions
from hotswap.plugins.schedulers.policies.fair_share import FairShare, FairShareOptions
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.policies.longest_prefix import LongestPrefix, LongestPrefixOptions
from hotswap.plugins.schedulers.policies.mlfq import Mlfq, MlfqOptions
from hotswap.plugins.schedulers.policies.shortest_first import ShortestFirst, ShortestFirstOptions
from hotswap.plugins.schedulers.victims.newest import Newest

NUM_RUNNING = 256


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, [RowResult(row.request_id, [7] if row.samples else []) for row in plan.scheduled])


def seconds_per_step(
    num_running: int = NUM_RUNNING,
    num_waiting: int = 0,
    prompt_length: int = 40,
    steps: int = 60,
    make_policy: Callable[[], Policy] = Fcfs,
    waiting_prompt_length: int = 1,
) -> float:
    """The fastest of some steps in which everybody decodes, with two steps in flight; CPU time of this thread."""
    policy = make_policy()
    limits = SchedulingLimits(max_num_seqs=num_running, max_num_batched_tokens=10**6, max_model_len=4096)
    mechanism = Mechanism(limits, KVCacheManager(60_000, 16), policy)
    scheduler = ContinuousBatching(mechanism, policy, Newest())
    for i in range(num_running + num_waiting):
        length = prompt_length if i < num_running else waiting_prompt_length
        mechanism.add(fake_request(i, [i % 50_000] * length, max_tokens=1000, user=f"user {i}"))
    plan = scheduler.schedule()
    assert plan is not None
    best = float("inf")
    for _ in range(steps):
        previous = result_of(plan)
        started = time.thread_time()
        plan = scheduler.schedule()
        scheduler.update(previous)
        best = min(best, time.thread_time() - started)
        assert plan is not None
        assert len(plan.scheduled) == num_running
    return best


def test_a_decode_costs_a_few_microseconds_per_request() -> None:
    """About 2.2 microseconds on the machine where this was written; the bound leaves room for slower and busier
    ones.
    """
    assert seconds_per_step() / NUM_RUNNING < 20e-6


def test_ten_thousand_waiting_requests_cost_nothing() -> None:
    assert seconds_per_step(num_waiting=10_000) < 2 * seconds_per_step()


POLICIES: dict[str, Callable[[], Policy]] = {
    "longest_prefix": lambda: LongestPrefix(LongestPrefixOptions(), ManualClock().now),
    "shortest_first": lambda: ShortestFirst(ShortestFirstOptions()),
    "mlfq": lambda: Mlfq(MlfqOptions(), ManualClock().now),
    "fair_share": lambda: FairShare(FairShareOptions()),
    "deadline": lambda: Deadline(DeadlineOptions(), ManualClock().now),
}


@pytest.mark.parametrize("name", POLICIES)
def test_ten_thousand_waiting_requests_cost_no_more_than_a_few_in_any_policy(name: str) -> None:
    """Prompts are long enough for look-ups in the prefix cache."""
    make_policy = POLICIES[name]
    seconds = [
        seconds_per_step(num_waiting=count, make_policy=make_policy, waiting_prompt_length=40, steps=40)
        for count in (10, 10_000)
    ]
    assert seconds[1] < 2 * seconds[0]


def test_long_contexts_cost_nothing() -> None:
    assert seconds_per_step(num_running=64, prompt_length=3000) < 2 * seconds_per_step(num_running=64, prompt_length=40)


def test_each_block_is_hashed_once_in_a_life(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Fcfs()
    kv = KVCacheManager(100, 4)
    mechanism = Mechanism(SchedulingLimits(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=400), kv, policy)
    scheduler = ContinuousBatching(mechanism, policy, Newest())
    num_keys = 0
    original = kv.index.block_key

    def counted(parent: bytes, tokens: bytes) -> bytes:
        nonlocal num_keys
        num_keys += 1
        return original(parent, tokens)

    monkeypatch.setattr(kv.index, "block_key", counted)
    mechanism.add(fake_request(0, range(41), max_tokens=100))
    while mechanism.num_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(result_of(plan))
    assert num_keys == 140 // 4
