"""Blocks that are being computed count as a prefix: whoever shares them waits for them, and every wait ends."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.config import SchedulerConfig
from hotswap.core.contracts.policy import KeyedPolicy, Policy, RequestView
from hotswap.core.engine.wire import EngineStats
from hotswap.core.errors import PlanError, RequestError
from hotswap.core.kv_cache import PendingBlocks
from hotswap.core.request import Request, Status, WaitingReason
from hotswap.core.scheduling.limits import SchedulingLimits, limits_of
from hotswap.core.scheduling.plan_builder import MAX_HOLDS
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.policies.priority import Priority
from hotswap.plugins.schedulers.victims.newest import Newest

PREFIX = list(range(100, 112))  # three blocks of four
SERVING: dict[str, Any] = {  # elsewhere one block of four is enough to wait for
    "min_tokens_awaited": SchedulingLimits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1).min_tokens_awaited
}


def harness_with(make_policy: Callable[[], Policy] = Fcfs, **settings: Any) -> SchedulingHarness:
    policy = make_policy()
    defaults: dict[str, Any] = {"num_blocks": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return SchedulingHarness(
        lambda mechanism: ContinuousBatching(mechanism, policy, Newest()),
        policy,
        **({"computes_once": True} | defaults | settings),
    )


def add_sharing(harness: SchedulingHarness, *numbers: int, **fields: Any) -> None:
    """Requests behind PREFIX, each with three tokens of its own."""
    for number in numbers:
        harness.add(fake_request(number, PREFIX + [number] * 3, **({"max_tokens": 4} | fields)))


def held(harness: SchedulingHarness) -> list[int]:
    waiting = {n: r for n, r in harness.requests.items() if r.status is Status.WAITING_FOR}
    return [n for n, r in waiting.items() if r.waiting_for is WaitingReason.PREFIX]


def running(harness: SchedulingHarness) -> list[int]:
    return [view.request_id for view in harness.mechanism.running]


def finish(harness: SchedulingHarness, *but: int) -> None:
    harness.drain()
    for number, ended in harness.ended.items():
        if number not in but:
            assert ended.token_ids == harness.expected_tokens(number)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [64, 7, 3])
def test_one_request_computes_the_prefix_and_the_others_hit_it(depth: int, budget: int) -> None:
    harness = harness_with(max_steps_in_flight=depth, max_num_batched_tokens=budget)
    add_sharing(harness, *range(6), max_tokens=1)
    finish(harness)
    assert harness.executor.num_tokens_computed == len(PREFIX) + 6 * 3
    assert [harness.ended[n].num_cached_tokens for n in range(6)] == [0] + [len(PREFIX)] * 5


def test_they_wait_from_the_plan_that_holds_the_first_one_and_are_all_in_the_one_after_its_result() -> None:
    harness = harness_with()
    add_sharing(harness, 0, 1, 2, 3)
    harness.schedule()
    assert (running(harness), held(harness)) == ([0], [1, 2, 3])
    assert all(harness.requests[n].status is Status.WAITING_FOR for n in (1, 2, 3))
    stats = EngineStats()
    harness.mechanism.fill_stats(stats)
    assert (stats.num_running, stats.num_waiting) == (1, 3)
    harness.schedule()
    assert held(harness) == [1, 2, 3]
    harness.confirm()
    assert held(harness) == []
    plan = harness.schedule()
    assert plan is not None
    assert [new.num_computed_tokens for new in plan.new] == [len(PREFIX)] * 3
    finish(harness)


def test_those_behind_pass_and_the_order_is_kept() -> None:
    harness = harness_with()
    add_sharing(harness, 0, 1)
    harness.add(fake_request(2, [7] * 5, max_tokens=9))
    harness.schedule()
    assert (running(harness), held(harness)) == ([0, 2], [1])
    harness.add(fake_request(3, [8] * 5))
    harness.confirm()
    plan = harness.schedule()
    assert plan is not None
    assert [new.request_id for new in plan.new] == [1, 3], "the one that waited goes first"
    finish(harness)


def test_whoever_waits_keeps_a_seat() -> None:
    harness = harness_with(max_num_seqs=3)
    add_sharing(harness, 0, 1, 2, 3)
    harness.add(fake_request(4, [7] * 5))
    harness.schedule()
    assert (running(harness), held(harness)) == ([0], [1, 2]), (
        "as many as can run; 3 stays in the queue, and 4 behind it"
    )
    harness.confirm()
    harness.schedule()
    assert running(harness) == [0, 1, 2]
    finish(harness)


def test_a_shorter_share_is_waited_for_too() -> None:
    harness = harness_with()
    add_sharing(harness, 0)
    harness.add(fake_request(1, PREFIX[:8] + [1] * 9, max_tokens=1))
    finish(harness)
    assert harness.ended[1].num_cached_tokens == 8


def test_what_was_scheduled_in_earlier_steps_counts_as_well() -> None:
    harness = harness_with(max_num_batched_tokens=8, max_steps_in_flight=3)
    add_sharing(harness, 0)
    harness.schedule()
    add_sharing(harness, 1)
    harness.schedule()
    assert held(harness) == [1]
    harness.confirm()
    assert held(harness) == [1], "the third block is in the second step"
    harness.confirm()
    assert held(harness) == []
    finish(harness)
    assert harness.ended[1].num_cached_tokens == 12


# Every way in which a wait ends.


def with_one_held(**settings: Any) -> SchedulingHarness:
    harness = harness_with(**settings)
    add_sharing(harness, 0, 1, 2)
    harness.schedule()
    assert held(harness) == [1, 2]
    return harness


def test_the_producer_is_aborted() -> None:
    harness = with_one_held()
    harness.abort(0)
    assert held(harness) == [], "at once, not at its update"
    harness.schedule()
    assert (running(harness), held(harness)) == ([0, 1], [2]), "the next one is the producer"
    finish(harness, 0)
    assert (harness.ended[0].finish_reason, harness.ended[2].num_cached_tokens) == ("abort", len(PREFIX))


def test_the_producer_fails() -> None:
    """Its blocks may hold anything: nobody gets them."""
    harness = with_one_held(errors=lambda request_id, index: "NaN" if request_id == 0 else None)
    harness.confirm()
    assert harness.ended[0].error == "NaN"
    assert held(harness) == []
    harness.schedule()
    assert (running(harness), held(harness)) == ([1], [2])
    finish(harness, 0)
    assert [harness.ended[n].num_cached_tokens for n in (1, 2)] == [0, len(PREFIX)]


def test_the_producer_ends_with_the_step() -> None:
    harness = harness_with()
    add_sharing(harness, 0, 1, max_tokens=0)
    finish(harness)
    assert harness.ended[1].num_cached_tokens == len(PREFIX)


def test_the_producer_is_preempted_in_the_middle_of_the_prefix() -> None:
    harness = harness_with(max_num_batched_tokens=9, max_steps_in_flight=1)
    harness.add(fake_request(9, [5], arrival_time=-1.0, max_tokens=20))
    add_sharing(harness, 0, 1)
    harness.schedule()
    assert running(harness) == [9, 0]
    builder = harness.mechanism.begin_plan()
    assert builder.can_hold(harness.requests[1])
    harness.mechanism.policy.remove(1)
    builder.hold(harness.requests[1])
    assert not builder.preempt(harness.requests[0]), "it is in flight"
    assert builder.build() is None
    assert held(harness) == [1], "what is in flight comes all the same"
    harness.confirm()
    assert (held(harness), running(harness)) == ([], [9])
    finish(harness)
    assert harness.requests[0].num_preemptions == 1
    assert harness.executor.num_tokens_computed == 1 + 19 + len(PREFIX) + 2 * 3 + 2 * 3


def test_abort_of_whoever_waits() -> None:
    harness = with_one_held()
    harness.abort(1)
    assert [n for n, r in harness.requests.items() if r.status is Status.WAITING_FOR] == [2]
    assert harness.mechanism.num_waiting == 1
    harness.abort(2)
    assert harness.mechanism.num_waiting == 0
    finish(harness, 1, 2)
    assert [(harness.ended[n].finish_reason, harness.ended[n].num_cached_tokens) for n in (1, 2)] == [("abort", 0)] * 2


def test_release_by_hand_queues_it() -> None:
    harness = with_one_held()
    harness.mechanism.release(1)
    assert (held(harness), harness.requests[1].status) == ([2], Status.WAITING)
    finish(harness)


def test_a_swap_of_policies_leaves_it_waiting_and_it_comes_back_to_the_new_one() -> None:
    harness = with_one_held()
    fresh = Priority()
    harness.mechanism.policy = harness.scheduler.policy = fresh
    assert (held(harness), len(fresh)) == ([1, 2], 0)
    harness.confirm()
    assert [view.request_id for view in fresh.waiting()] == [1, 2]
    finish(harness)


@pytest.mark.parametrize("depth", [1, 2])
def test_reset_of_the_prefix_cache_meanwhile(depth: int) -> None:
    harness = with_one_held(max_steps_in_flight=depth)
    harness.mechanism.reset_prefix_cache()
    assert held(harness) == [1, 2]
    finish(harness)


def test_nobody_waits_without_end() -> None:
    """Producers that come and go, for ever: after so many waits it computes its prefix itself."""
    harness = harness_with(computes_once=False)
    add_sharing(harness, 10**6)
    for number in range(3 * MAX_HOLDS):
        request = harness.requests[10**6]
        if request.status is Status.RUNNING:
            break
        add_sharing(harness, number, arrival_time=-1.0)  # somebody who goes first
        harness.schedule()
        harness.abort(number)
        harness.confirm()
    assert request.status is Status.RUNNING
    assert request.num_holds == MAX_HOLDS
    finish(harness, *range(3 * MAX_HOLDS))


# Who waits, and for whom.


@pytest.mark.parametrize(
    "fields", [{"cache_salt": "tenant"}, {"adapter_key": "digest"}, {"prompt_logprobs": 1}, {"cache_salt": ""}]
)
def test_other_tenants_and_those_that_owe_scores_do_not_wait(fields: dict[str, Any]) -> None:
    harness = harness_with()
    add_sharing(harness, 0)
    add_sharing(harness, 1, **fields)
    harness.schedule()
    assert (running(harness), held(harness)) == ([0, 1], [])
    finish(harness)


def test_one_that_owes_scores_computes_for_others() -> None:
    harness = harness_with()
    add_sharing(harness, 0, prompt_logprobs=1)
    add_sharing(harness, 1)
    harness.schedule()
    assert held(harness) == [1]
    finish(harness)


def test_two_that_compute_the_same_block_and_the_first_one_dies() -> None:
    harness = harness_with()
    add_sharing(harness, 0, 1, prompt_logprobs=1)
    add_sharing(harness, 2)
    harness.schedule()
    assert (running(harness), held(harness)) == ([0, 1], [2])
    harness.abort(0)
    assert held(harness) == [2], "the other one delivers"
    harness.confirm()
    assert held(harness) == []
    finish(harness, 0)
    assert harness.ended[2].num_cached_tokens == len(PREFIX)


@pytest.mark.parametrize("off", [{"enable_prefix_caching": False}, {"chunkable": False}])
def test_without_prefix_caching_nobody_waits(off: dict[str, Any]) -> None:
    harness = harness_with(**off)
    add_sharing(harness, 0, 1)
    harness.schedule()
    assert (running(harness), held(harness)) == ([0, 1], [])
    assert len(harness.kv.pending) == 0
    finish(harness)


class Throttled(Fcfs):
    """Gives request 0 one token a step."""

    def share(self, view: RequestView, budget: Any) -> int:
        return 1 if view.request_id == 0 else int(budget.num_tokens)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_producer_that_is_kept_short_keeps_nobody(depth: int) -> None:
    harness = harness_with(Throttled, max_steps_in_flight=depth)
    add_sharing(harness, 0, 1)
    for _ in range(2):
        harness.step()
    assert running(harness) == [0, 1], "no whole block is in flight: 1 computes it itself"
    finish(harness)


class StarvesTheWorst(Priority):
    """Gives class 2 one step, and nothing from then on while others are there."""

    def share(self, view: RequestView, budget: Any) -> int:
        if view.priority < 2:
            return int(budget.num_tokens)
        return 6 if not view.num_scheduled_tokens or not len(self) else 0


def test_a_better_class_does_not_wait_for_a_starved_one() -> None:
    harness = harness_with(StarvesTheWorst)
    add_sharing(harness, 0, priority=2, max_tokens=1)
    harness.add(fake_request(9, [9], priority=3, max_tokens=1))  # so that the queue is never empty
    harness.schedule()
    add_sharing(harness, 1, priority=1)
    harness.schedule()
    assert held(harness) == [1], "one block is in flight, the next ones are nobody's"
    harness.confirm()
    harness.schedule()
    assert running(harness) == [1, 0]
    assert harness.requests[1].num_computed_tokens == 4
    finish(harness)


class Shortest(KeyedPolicy):
    def key(self, view: RequestView) -> int:
        return view.num_prompt_tokens


def test_a_policy_with_an_order_of_its_own() -> None:
    harness = harness_with(Shortest)
    harness.add(fake_request(0, PREFIX + [1] * 9, max_tokens=2))
    harness.add(fake_request(1, PREFIX + [2] * 2, max_tokens=2))
    harness.schedule()
    assert (running(harness), held(harness)) == ([1], [0])
    finish(harness)


def test_those_that_wait_count_for_the_limit_of_the_queue() -> None:
    harness = harness_with(max_num_queued_reqs=3)
    add_sharing(harness, 0, 1, 2)
    harness.schedule()
    add_sharing(harness, 3)
    with pytest.raises(RequestError, match="3 requests are waiting"):
        harness.add(fake_request(4))
    del harness.requests[4]
    finish(harness)


def test_misuse_is_refused() -> None:
    harness = harness_with()
    add_sharing(harness, 0, 1)
    builder = harness.mechanism.begin_plan()
    with pytest.raises(PlanError, match="nobody computes enough of its next blocks"):
        builder.hold(harness.requests[0])
    builder.admit(harness.mechanism.policy.pop(), 15)
    builder.hold(harness.requests[1])
    with pytest.raises(PlanError, match="request 1 is not waiting"):
        builder.hold(harness.requests[1])
    with pytest.raises(PlanError, match="holds 1 waiting requests, but 0 were given"):
        builder.build()


# What is worth waiting for.


def is_held(shared: int, own: int, budget: int = 8192) -> bool:
    """Whether a request waits for so many tokens in flight, where the step has `budget` left for it."""
    limits = {"num_blocks": 512, "block_size": 16, "max_model_len": 4096, "max_num_batched_tokens": shared + 1 + budget}
    harness = harness_with(**(limits | SERVING), computes_once=False)
    prefix = list(range(100, 100 + shared))
    harness.add(fake_request(0, [*prefix, 7], max_tokens=2))
    harness.add(fake_request(1, [*prefix, *[8] * own], max_tokens=2))
    harness.schedule()
    waits = held(harness) == [1]
    finish(harness)
    return waits


def test_a_few_tokens_are_computed_again() -> None:
    """A step of latency is more than they take."""
    assert [is_held(shared, own=10) for shared in (16, 48, 63, 64, 80)] == [False, False, False, True, True]


def test_what_is_a_small_part_of_the_work_is_computed_again() -> None:
    """A hundred documents behind one short instruction would otherwise leave the step to the first of them."""
    assert [is_held(64, own) for own in (192, 193, 3000)] == [True, False, False]
    assert [is_held(1024, own) for own in (64, 2900)] == [True, True]


def test_what_the_step_has_no_room_for_does_not_count() -> None:
    """128 of at most 256 tokens, and of 513."""
    assert is_held(128, own=3000, budget=256)
    assert not is_held(128, own=3000, budget=513)


def test_whoever_would_be_no_further_waits_for_little_too() -> None:
    """All that it would compute in this step is in flight: it loses nothing."""
    assert is_held(16, own=3000, budget=16)
    assert not is_held(16, own=3000, budget=17)


def test_tokens_that_are_there_already_do_not_count() -> None:
    harness = harness_with(**SERVING, num_blocks=512, block_size=16, max_model_len=4096, max_num_batched_tokens=8192)
    prefix = list(range(100, 148))
    harness.add(fake_request(0, [*prefix, 7], max_tokens=1))
    finish(harness)
    longer = [*prefix, *range(500, 564)]  # 48 tokens are indexed, and 64 will be in flight
    for number in (1, 2):
        harness.add(fake_request(number, [*longer, *[number] * 192], max_tokens=1))
    harness.add(fake_request(3, [*longer, *[3] * 193], max_tokens=1))
    harness.schedule()
    assert (running(harness), held(harness)) == ([1, 3], [2])
    finish(harness)


# What it is for, and what it costs.


def shared_prefix() -> tuple[list[list[int]], list[int]]:
    """The benchmark's workload: 256 requests of 64 tokens behind one prefix of 1,024."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "workloads.py"
    prompts, outputs = runpy.run_path(str(path))["shared_prefix"](output=2)
    assert {len(prompt) for prompt in prompts} == {1024 + 64} and len(prompts) == 256
    return prompts, outputs


def num_prompt_tokens_computed(**settings: Any) -> int:
    """With limits as in serving, two steps in flight."""
    defaults = {"num_blocks": 4096, "block_size": 16, "max_num_seqs": 256, "max_model_len": 2048}
    harness = harness_with(**(defaults | SERVING | settings))
    harness.executor = Counting(harness)  # type: ignore[assignment]
    prompts, outputs = shared_prefix()
    for number, (prompt, max_tokens) in enumerate(zip(prompts, outputs, strict=True)):
        harness.add(fake_request(number, prompt, max_tokens=max_tokens))
    schedule = harness.scheduler.schedule
    while harness.mechanism.num_unfinished:
        plans = [plan for plan in (schedule(), schedule()) if plan is not None]
        for plan in plans:
            harness.scheduler.update(harness.executor.run(plan))  # type: ignore[attr-defined]
    harness.mechanism.check_integrity()
    return harness.executor.num_tokens_computed - 256  # each second output token


@pytest.mark.parametrize("budget", [512, 8192, 16_384])
def test_256_requests_behind_one_prefix_compute_it_once(budget: int) -> None:
    assert num_prompt_tokens_computed(max_num_batched_tokens=budget) == 1024 + 256 * 64 == 17_408


def test_without_waiting_they_compute_it_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingBlocks, "num_pending", lambda *given: 0)
    assert num_prompt_tokens_computed(max_num_batched_tokens=8192) > 31_000


class Counting:
    """Draws a token wherever one is asked for."""

    def __init__(self, harness: SchedulingHarness) -> None:
        self.num_tokens_computed = 0

    def run(self, plan: Any) -> Any:
        from hotswap.core.contracts.plan import RowResult, StepResult

        self.num_tokens_computed += plan.num_tokens
        return StepResult(plan.step_id, [RowResult(r.request_id, [7] if r.samples else []) for r in plan.scheduled])


@pytest.mark.parametrize("num_sharing", [1, 2000])
def test_a_plan_looks_at_nobody_who_waits(num_sharing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is looked at once when it would be admitted, and once when its block has come; and no more than can run."""
    seats = 40
    harness = harness_with(
        num_blocks=1024, block_size=16, max_num_seqs=seats, max_num_batched_tokens=256, max_model_len=4096
    )
    for number in range(num_sharing):
        harness.add(fake_request(number, range(64), max_tokens=8))
    looks: list[int] = []
    original = harness.kv.match

    def match(request: Request) -> object:
        looks.append(request.request_id)
        return original(request)

    monkeypatch.setattr(harness.kv, "match", match)
    schedule = harness.scheduler.schedule
    plan = schedule()
    assert plan is not None
    assert len(held(harness)) == min(num_sharing, seats) - 1
    looks.clear()
    assert schedule() is not None
    assert schedule() is not None
    assert looks == []


def test_a_cpu_waits_for_any_block() -> None:
    """It pays for each token; a GPU's step of few rows reads the weights anyway."""
    asked = SchedulerConfig()
    assert limits_of(asked, 4096, on_cpu=True).min_tokens_awaited == 1
    assert limits_of(asked, 4096, on_cpu=False).min_tokens_awaited == 64
