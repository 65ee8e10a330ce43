from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hotswap.core.contracts.plan import RowResult, StepResult
from hotswap.core.contracts.policy import Policy
from hotswap.core.contracts.victim import VictimRule
from hotswap.core.engine.wire import EngineStats
from hotswap.core.errors import PlanError, RequestError, UsageError
from hotswap.core.kv_cache import KVCacheManager
from hotswap.core.request import Status, WaitingReason
from hotswap.core.scheduling.limits import SchedulingLimits, check_limits, effective_window
from hotswap.core.scheduling.mechanism import Mechanism
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.core.testing.scripted_executor import prompt_logprob
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.policies.priority import Priority
from hotswap.plugins.schedulers.victims.newest import Newest


def harness_with(
    victim: VictimRule | None = None, make_policy: Callable[[], Policy] = Fcfs, **settings: Any
) -> SchedulingHarness:
    policy = make_policy()
    return SchedulingHarness(
        lambda mechanism: ContinuousBatching(mechanism, policy, victim or Newest()), policy, **settings
    )


# At the door.


@pytest.mark.parametrize("max_tokens", [None, 0, 1, 64])
@pytest.mark.parametrize("length", [63, 64, 65, 200])
def test_window(length: int, max_tokens: int | None) -> None:
    """C01: a prompt that leaves no room is refused, any other may produce what the window leaves."""
    harness = harness_with(num_blocks=100, max_model_len=64)
    request = fake_request(0, [1] * length, max_tokens=max_tokens)
    if length >= 64:
        with pytest.raises(
            RequestError, match=f"the prompt has {length} tokens, but the context window is 64"
        ) as refusal:
            harness.add(request)
        assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")
        return
    harness.add(request)
    assert request.max_tokens == (0 if max_tokens == 0 else 1)
    harness.drain()
    assert harness.ended[0].finish_reason == "length"


def test_a_prompt_that_never_fits_the_pool_blocks_nobody() -> None:
    """C08."""
    harness = harness_with(num_blocks=49, max_model_len=512, max_num_batched_tokens=512)
    assert harness.mechanism.window == 196
    with pytest.raises(RequestError, match="context window is 196"):
        harness.add(fake_request(0, [1] * 300))
    harness.add(fake_request(1, [1] * 5, max_tokens=3))
    harness.drain()
    assert harness.ended[1].token_ids == harness.expected_tokens(1)


def test_a_request_may_fill_the_whole_pool() -> None:
    """E04: the effective window is what the pool holds, so the last running request always fits."""
    harness = harness_with(num_blocks=6, max_model_len=512)
    harness.add(fake_request(0, [1] * 10, max_tokens=None))
    harness.drain()
    assert len(harness.ended[0].token_ids) == 14
    assert harness.ended[0].finish_reason == "length"


@pytest.mark.parametrize(("num_steps", "reason", "num_tokens"), [(1, "error", 0), (3, "length", 2)])
def test_a_request_that_outgrows_the_pool_all_the_same_ends_alone(num_steps: int, reason: str, num_tokens: int) -> None:
    """E04: cannot happen while the books are right; here somebody has taken the blocks away behind the pool's back."""
    harness = harness_with(num_blocks=3, max_num_batched_tokens=4, max_steps_in_flight=1)
    harness.add(fake_request(0, range(7), max_tokens=None))
    for _ in range(num_steps):
        harness.step()
    stolen = harness.kv.pool.allocate(harness.kv.pool.num_free_blocks)
    for _ in range(3):
        if (plan := harness.scheduler.schedule()) is not None:
            harness.executor.execute(plan)
            harness.mechanism.update(harness.executor.next_result())
    update = harness.mechanism.take_updates()[0]
    assert update.finish_reason == reason
    assert (update.error is None) == (reason == "length")
    assert len(harness.requests[0].output_token_ids) == num_tokens
    harness.kv.pool.free(stolen)
    assert harness.kv.pool.num_free_blocks == 3
    harness.confirmed.clear()
    harness.add(fake_request(1, [2] * 5, max_tokens=3))
    harness.drain()
    assert harness.ended[1].token_ids == harness.expected_tokens(1)


def test_no_tokens_and_a_full_queue_are_refused() -> None:
    harness = harness_with(max_num_queued_reqs=2)
    with pytest.raises(RequestError, match="no tokens") as refusal:
        harness.add(fake_request(0, []))
    assert refusal.value.status == 400
    for i in range(2):
        harness.add(fake_request(i, [1]))
    with pytest.raises(RequestError, match="2 requests are waiting") as refusal:
        harness.add(fake_request(2, [1]))
    assert refusal.value.status == 429
    harness.step()
    harness.add(fake_request(2, [1]))
    harness.drain()


def test_an_id_in_use_is_refused() -> None:
    harness = harness_with()
    harness.add(fake_request(0))
    with pytest.raises(RequestError, match="in use"):
        harness.mechanism.add(fake_request(0))
    harness.drain()


def test_settings_that_cannot_serve_the_window_are_refused_at_start() -> None:
    limits = SchedulingLimits(max_num_seqs=4, max_num_batched_tokens=63, max_model_len=64, enable_chunked_prefill=False)
    with pytest.raises(UsageError, match=r"max_num_batched_tokens \(63\) is less than the window \(64 tokens\)"):
        Mechanism(limits, KVCacheManager(100, 4), Fcfs())
    Mechanism(limits, KVCacheManager(15, 4), Fcfs())  # the pool holds 60
    with pytest.raises(UsageError, match="max_num_seqs must be at least 1"):
        check_limits(SchedulingLimits(max_num_seqs=0, max_num_batched_tokens=1, max_model_len=1), 1)
    assert effective_window(100, 3, 16) == 48


# How a request ends.


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("sampling", "num_tokens", "reason", "stop_reason"),
    [
        ({"max_tokens": 5}, 5, "length", None),
        ({"max_tokens": 5, "eos_token_ids": [1002]}, 3, "stop", None),
        ({"max_tokens": 5, "eos_token_ids": [9, 1002], "stop_token_ids": [1002]}, 3, "stop", None),
        ({"max_tokens": 5, "stop_token_ids": [1002]}, 3, "stop", 1002),
        ({"max_tokens": 5, "eos_token_ids": [1002], "ignore_eos": True}, 5, "length", None),
        ({"max_tokens": 5, "eos_token_ids": [1002], "stop_token_ids": [1002], "ignore_eos": True}, 3, "stop", 1002),
        ({"max_tokens": 5, "stop_token_ids": [1002], "min_tokens": 4}, 5, "length", None),
        ({"max_tokens": 5, "stop_token_ids": [1002], "min_tokens": 3}, 3, "stop", 1002),
        ({"max_tokens": 3, "eos_token_ids": [1002]}, 3, "stop", None),
        ({"max_tokens": 0}, 0, "length", None),
        ({"max_tokens": 1}, 1, "length", None),
    ],
)
def test_ends(depth: int, sampling: dict[str, Any], num_tokens: int, reason: str, stop_reason: int | None) -> None:
    harness = harness_with(max_steps_in_flight=depth, max_num_batched_tokens=4)
    harness.add(fake_request(0, range(6), **sampling))
    harness.drain()
    ended = harness.ended[0]
    assert ended.token_ids == [1000 + i for i in range(num_tokens)]
    assert (ended.finish_reason, ended.stop_reason) == (reason, stop_reason)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 7])
def test_nothing_is_computed_past_max_tokens(depth: int, max_tokens: int) -> None:
    harness = harness_with(max_steps_in_flight=depth)
    harness.add(fake_request(0, range(6), max_tokens=max_tokens))
    harness.drain()
    assert harness.executor.num_tokens_computed == 6 + max(0, max_tokens - 1)


def test_a_token_drawn_after_the_end_is_discarded_and_its_block_is_not_reused_early() -> None:
    harness = harness_with(num_blocks=4, max_steps_in_flight=2)
    harness.add(fake_request(0, range(8), max_tokens=8, stop_token_ids=[1000]))
    while harness.schedule() is not None:
        pass
    assert harness.executor.num_in_flight == 2
    harness.confirm()
    assert harness.ended[0].token_ids == [1000]
    assert harness.kv.pool.num_free_blocks == 1, "step 1 still writes into them"
    assert harness.mechanism.num_pending_removals == 1
    assert harness.confirm() == []
    assert harness.kv.pool.num_free_blocks == 4


def test_a_fault_of_one_row_ends_that_request_only() -> None:
    harness = harness_with(errors=lambda request_id, index: "NaN" if (request_id, index) == (1, 2) else None)
    for i in range(3):
        harness.add(fake_request(i, [i] * 5, max_tokens=6))
    harness.drain()
    assert (harness.ended[1].finish_reason, harness.ended[1].error) == ("error", "NaN")
    assert harness.ended[1].token_ids == harness.expected_tokens(1)[:2]
    for i in (0, 2):
        assert harness.ended[i].token_ids == harness.expected_tokens(i)


@pytest.mark.parametrize("depth", [1, 2])
def test_abort(depth: int) -> None:
    """N01: waiting ones end at once, those in flight at their next update; unknown ids are ignored."""
    harness = harness_with(max_steps_in_flight=depth, max_num_seqs=1)
    for i in range(3):
        harness.add(fake_request(i, [i] * 5, max_tokens=30))
    harness.step()
    harness.schedule()
    harness.abort(2)
    harness.abort(99)
    harness.abort(0)
    assert harness.mechanism.num_waiting == 1
    harness.step()
    assert {i: harness.ended[i].finish_reason for i in harness.ended} == {0: "abort", 2: "abort"}
    assert harness.ended[0].token_ids == harness.expected_tokens(0)[:1]
    assert harness.ended[2].num_cached_tokens == 0
    harness.abort(0)
    harness.drain()
    assert harness.ended[1].token_ids == harness.expected_tokens(1)


def test_abort_of_the_last_request_is_handed_out_without_a_step() -> None:
    harness = harness_with()
    harness.add(fake_request(0))
    harness.mechanism.abort(0)
    assert harness.mechanism.num_unfinished == 1
    assert [update.finish_reason for update in harness.mechanism.take_updates()] == ["abort"]
    assert harness.mechanism.num_unfinished == 0


def test_removals_go_with_the_next_plan() -> None:
    harness = harness_with()
    harness.add(fake_request(0, max_tokens=1))
    harness.drain()
    assert harness.mechanism.num_pending_removals == 1
    assert harness.schedule() is None
    harness.add(fake_request(1, max_tokens=1))
    plan = harness.schedule()
    assert plan is not None
    assert plan.removed == [0]
    harness.drain()


# The plan's deltas and their confirmation.


def test_plan_of_a_prompt_in_chunks() -> None:
    harness = harness_with(max_num_batched_tokens=6, max_steps_in_flight=1)
    harness.add(fake_request(0, range(10), max_tokens=3))
    for _ in range(4):
        harness.step()
    rows = [
        (p.scheduled[0].num_tokens, p.scheduled[0].num_scheduled_tokens_before, p.scheduled[0].samples)
        for p in harness.plans
    ]
    assert rows == [(6, 0, False), (4, 6, True), (1, 10, True), (1, 11, True)]
    assert [len(p.new) for p in harness.plans] == [1, 0, 0, 0]
    assert harness.plans[0].new[0].token_ids == list(range(10))
    assert [p.scheduled[0].new_block_ids for p in harness.plans] == [None, [[3]], None, None]
    assert [p.step_id for p in harness.plans] == [0, 1, 2, 3]


def test_plans_share_no_list_with_requests() -> None:
    harness = harness_with()
    request = fake_request(0, range(6), max_tokens=5)
    harness.add(request)
    plan = harness.schedule()
    assert plan is not None
    plan.new[0].token_ids.append(7)
    plan.new[0].block_ids[0].append(7)
    assert request.prompt_token_ids == list(range(6))
    assert 7 not in request.block_ids
    harness.confirm()


def test_results_must_fit_the_plan() -> None:
    harness = harness_with()
    harness.add(fake_request(0, max_tokens=5))
    with pytest.raises(PlanError, match="oldest step in flight is none"):
        harness.mechanism.update(StepResult(0, []))
    harness.schedule()
    with pytest.raises(PlanError, match="result of step 1, but the oldest step in flight is 0"):
        harness.mechanism.update(StepResult(1, []))
    with pytest.raises(PlanError, match="are not those of its plan"):
        harness.mechanism.update(StepResult(0, [RowResult(5, [1])]))


def test_a_missing_token_is_noticed() -> None:
    harness = harness_with()
    harness.add(fake_request(0, max_tokens=5))
    harness.schedule()
    with pytest.raises(PlanError, match="0 tokens drawn"):
        harness.mechanism.update(StepResult(0, [RowResult(0, [])]))


def test_prompts_are_whole_without_chunked_prefill() -> None:
    harness = harness_with(max_num_batched_tokens=24, max_model_len=24, enable_chunked_prefill=False)
    for i in range(4):
        harness.add(fake_request(i, [i] * 15, max_tokens=6))
    harness.drain()
    assert {row.num_tokens for plan in harness.plans for row in plan.scheduled} == {15, 1}
    assert all(harness.ended[i].token_ids == harness.expected_tokens(i) for i in range(4))


def test_a_model_that_cannot_be_chunked_reuses_no_prefix() -> None:
    harness = harness_with(max_num_batched_tokens=48, chunkable=False)
    for i in range(2):
        harness.add(fake_request(i, range(20), max_tokens=2))
        harness.drain()
    assert harness.ended[1].num_cached_tokens == 0
    assert harness.executor.num_tokens_computed == 2 * 21


# Prefix hits.


@pytest.mark.parametrize(("length", "cached"), [(8, 4), (9, 8), (3, 0)])
def test_a_repeated_prompt_computes_at_least_its_last_token(length: int, cached: int) -> None:
    """D01."""
    harness = harness_with()
    for i in range(2):
        harness.add(fake_request(i, range(length), max_tokens=3))
        harness.drain()
    assert harness.ended[0].num_cached_tokens == 0
    assert harness.ended[1].num_cached_tokens == cached
    stats = EngineStats()
    harness.mechanism.fill_stats(stats)
    assert (stats.prefix_queries, stats.prefix_hits) == (2 * length, cached)


def test_prompt_logprobs_are_complete_on_a_warm_cache() -> None:
    """D04: all positions, every time; hit metrics are not inflated."""
    harness = harness_with(num_blocks=20)
    for i in range(3):
        harness.add(fake_request(i, range(20), max_tokens=2, prompt_logprobs=2))
        harness.drain()
        assert harness.ended[i].prompt_logprobs == [prompt_logprob(list(range(20)), p) for p in range(1, 20)]
        assert harness.ended[i].num_cached_tokens == 0
    stats = EngineStats()
    harness.mechanism.fill_stats(stats)
    assert (stats.prefix_queries, stats.prefix_hits) == (0, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_survive_preemption_in_the_middle_of_the_prompt(depth: int) -> None:
    """E01: exactly one entry per position, handed out once."""
    harness = harness_with(num_blocks=20, max_num_batched_tokens=8, max_steps_in_flight=depth)
    harness.add(fake_request(0, [5] * 3, max_tokens=30))
    request = fake_request(1, range(40), max_tokens=4, prompt_logprobs=1)
    harness.add(request)
    while request.num_computed_tokens < 21:
        harness.step()
    while harness.confirm():
        pass
    builder = harness.mechanism.begin_plan()
    assert builder.preempt(request)
    builder.build()
    assert (request.status, request.num_preemptions, request.num_computed_tokens) == (Status.WAITING, 1, 0)
    harness.drain()
    assert harness.ended[1].prompt_logprobs == [prompt_logprob(list(range(40)), p) for p in range(1, 40)]
    assert harness.ended[1].token_ids == harness.expected_tokens(1)


def test_prompt_logprobs_are_not_handed_out_again_after_a_later_preemption() -> None:
    harness = harness_with(num_blocks=20)
    harness.add(fake_request(0, [5] * 3, max_tokens=30))
    request = fake_request(1, range(14), max_tokens=20, prompt_logprobs=1)
    harness.add(request)
    while request.num_output_tokens < 5:
        harness.step()
    while harness.confirm():
        pass
    builder = harness.mechanism.begin_plan()
    assert builder.preempt(request)
    builder.build()
    plan = harness.schedule()
    assert plan is not None
    assert plan.removed == [1]
    assert plan.new[0].num_computed_tokens >= 16, "what is delivered may be reused"
    harness.drain()
    assert harness.ended[1].token_ids == harness.expected_tokens(1)


def test_prompt_scoring_produces_no_token() -> None:
    """C04: max_tokens 0 with prompt_logprobs."""
    harness = harness_with(max_num_batched_tokens=6)
    harness.add(fake_request(0, range(10), max_tokens=0, prompt_logprobs=1))
    harness.add(fake_request(1, [3], max_tokens=0, prompt_logprobs=1))
    harness.drain()
    assert harness.ended[0].token_ids == []
    assert harness.ended[0].prompt_logprobs == [prompt_logprob(list(range(10)), p) for p in range(1, 10)]
    assert harness.ended[1].prompt_logprobs == []


def test_salts_keep_tenants_apart_after_preemption_too() -> None:
    """D05."""
    harness = harness_with(num_blocks=7, max_num_seqs=2, victim=Newest())
    cached = []
    for i, salt in enumerate(["a", "b", "a"]):
        harness.add(fake_request(i, range(9), max_tokens=2, cache_salt=salt))
        harness.drain()
        cached.append(harness.ended[i].num_cached_tokens)
    assert cached == [0, 0, 8]
    for i, salt in ((3, "a"), (4, "b")):
        harness.add(fake_request(i, range(9), max_tokens=12, cache_salt=salt))
    harness.drain()
    assert sum(r.num_preemptions for r in harness.requests.values()) > 0
    assert all(harness.ended[i].token_ids == harness.expected_tokens(i) for i in (3, 4))


# Preemption.


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_blocks_run_out_and_everybody_finishes(depth: int) -> None:
    harness = harness_with(num_blocks=8, max_steps_in_flight=depth, enable_prefix_caching=False)
    for i in range(4):
        harness.add(fake_request(i, [i] * 6, max_tokens=20))
    harness.drain()
    assert sum(r.num_preemptions for r in harness.requests.values()) > 0
    assert harness.requests[0].num_preemptions == 0, "the oldest never yields"
    assert all(harness.ended[i].token_ids == harness.expected_tokens(i) for i in range(4))
    stats = EngineStats()
    harness.mechanism.fill_stats(stats)
    assert stats.num_preemptions_recompute == sum(r.num_preemptions for r in harness.requests.values())


def test_a_victim_in_flight_yields_at_its_update_and_nobody_else_is_asked_meanwhile() -> None:
    harness = harness_with(num_blocks=6, max_steps_in_flight=2, max_num_batched_tokens=64, enable_prefix_caching=False)
    for i in range(3):
        harness.add(fake_request(i, [i] * 7, max_tokens=20))
    harness.step()
    assert harness.executor.num_in_flight == 1  # everybody's eighth token: the pool is full
    assert harness.schedule() is None
    assert [harness.requests[i].preempt_pending for i in range(3)] == [False, False, True]
    assert harness.mechanism.num_running == 3
    assert harness.schedule() is None
    assert [harness.requests[i].preempt_pending for i in range(3)] == [False, False, True]
    assert len(harness.confirm()) == 3
    assert harness.requests[2].status is Status.WAITING
    assert [harness.requests[i].num_preemptions for i in range(3)] == [0, 0, 1]
    harness.drain()
    assert all(harness.ended[i].token_ids == harness.expected_tokens(i) for i in range(3))


def test_a_request_taken_out_and_back_in_one_plan_is_removed_and_new() -> None:
    harness = harness_with(max_steps_in_flight=1, max_num_batched_tokens=32)
    for i in range(2):
        harness.add(fake_request(i, [i] * 9, max_tokens=9))
    harness.step()
    request = harness.requests[1]
    builder = harness.mechanism.begin_plan()
    assert builder.preempt(request)
    builder.schedule(harness.requests[0], 1)
    view = harness.scheduler.policy.pop()
    assert view is request
    assert builder.num_tokens_to_admit(request) == 2, "its own prompt blocks are hits"
    builder.admit(request, 2)
    plan = builder.build()
    assert plan is not None
    assert plan.removed == [1]
    assert plan.new[0].token_ids == [1] * 9 + [1100]
    assert plan.new[0].num_prompt_tokens == 9
    assert plan.new[0].num_computed_tokens == 8
    harness.executor.execute(plan)
    harness.confirm()
    harness.drain()
    assert harness.ended[1].token_ids == harness.expected_tokens(1)


def test_a_prompt_is_not_admitted_before_the_pool_can_hold_it_beside_those_that_run() -> None:
    harness = harness_with(num_blocks=10, max_num_batched_tokens=4, max_steps_in_flight=1)
    harness.add(fake_request(0, [1] * 20, max_tokens=4))
    harness.add(fake_request(1, [2] * 22, max_tokens=4))
    for _ in range(7):
        harness.step()
        assert harness.mechanism.num_running == 1, "5 blocks are promised to the first prompt, 6 would be needed"
    harness.drain()
    assert harness.requests[1].num_preemptions == 0


# Order, seats, reasons to wait.


def test_seats() -> None:
    harness = harness_with(max_num_seqs=2, num_blocks=40)
    for i in range(5):
        harness.add(fake_request(i, [i] * 3, max_tokens=3))
    harness.step()
    assert (harness.mechanism.num_running, harness.mechanism.num_waiting) == (2, 3)
    harness.drain()


def test_running_requests_are_in_service_order() -> None:
    harness = harness_with(make_policy=Priority, num_blocks=40, max_num_seqs=8)
    order = [(0, 1, 9.0), (1, 0, 8.0), (2, 1, 3.0), (3, 0, 7.0), (4, 0, 7.0)]
    for request_id, priority, arrival_time in order:
        harness.add(fake_request(request_id, [1], priority=priority, arrival_time=arrival_time, max_tokens=9))
    harness.step()
    assert [r.request_id for r in harness.mechanism.running] == [3, 4, 1, 2, 0]
    harness.drain()


def test_a_request_may_wait_for_something_else_first() -> None:
    harness = harness_with()
    request = fake_request(0)
    harness.add(request, waiting_for=WaitingReason.GRAMMAR)
    assert (request.status, request.waiting_for) == (Status.WAITING_FOR, WaitingReason.GRAMMAR)
    assert harness.schedule() is None
    assert harness.mechanism.num_waiting == 1
    harness.mechanism.release(0)
    harness.mechanism.release(0)
    assert (request.status, request.waiting_for) == (Status.WAITING, None)
    harness.drain()
    other = fake_request(1)
    harness.mechanism.add(other, waiting_for=WaitingReason.ADAPTER)
    harness.mechanism.abort(1)
    harness.mechanism.release(1)
    assert [u.finish_reason for u in harness.mechanism.take_updates()] == ["abort"]
    assert harness.mechanism.num_waiting == 0


def test_the_policy_can_be_swapped_while_requests_wait() -> None:
    harness = harness_with(max_num_seqs=1)
    for i, priority in enumerate([0, 2, 1]):
        harness.add(fake_request(i, [i] * 3, priority=priority, max_tokens=3))
    harness.step()
    fresh = Priority()
    harness.mechanism.policy = fresh
    harness.scheduler.policy = fresh
    harness.drain()
    assert list(harness.ended) == [0, 2, 1]


def test_refuse_needs_a_waiting_request() -> None:
    harness = harness_with()
    with pytest.raises(PlanError, match="request 3 is not waiting"):
        harness.mechanism.refuse(3, "no", 429)


def test_gauges() -> None:
    harness = harness_with(num_blocks=10, max_num_seqs=2, max_steps_in_flight=1)
    for i in range(3):
        harness.add(fake_request(i, [i] * 6, max_tokens=9))
    harness.step()
    stats = EngineStats()
    harness.mechanism.fill_stats(stats)
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert stats.kv_usage == pytest.approx(0.4)
    assert stats.kv_waste == pytest.approx(4 / 16)
    harness.drain()
    harness.mechanism.fill_stats(stats)
    assert (stats.num_running, stats.num_waiting, stats.kv_usage, stats.kv_waste) == (0, 0, 0.0, 0.0)
