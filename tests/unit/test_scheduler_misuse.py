"""Scheduler and policy plugins that do what they must not: an error that says so, never tokens in the wrong place."""

from __future__ import annotations

from typing import Any

import pytest

from hotswap.core.clock import ManualClock
from hotswap.core.contracts.plan import StepPlan
from hotswap.core.contracts.policy import RequestView
from hotswap.core.engine.engine_core import EngineCore
from hotswap.core.errors import PlanError
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.victims.newest import Newest


def harness_of(kind: type[ContinuousBatching], policy: Fcfs | None = None, **limits: Any) -> SchedulingHarness:
    chosen = Fcfs() if policy is None else policy
    return SchedulingHarness(lambda mechanism: kind(mechanism, chosen, Newest()), chosen, **limits)


class Sorts(ContinuousBatching):
    """Turns the rows of the finished plan around."""

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        if plan is not None:
            plan.scheduled.reverse()
        return plan


def test_a_plan_whose_rows_were_moved_is_refused_and_not_mixed_up() -> None:
    harness = harness_of(Sorts)
    for number in range(2):
        harness.add(fake_request(number, [1, 2, 3], max_tokens=3))
    with pytest.raises(PlanError, match="not those of its plan"):
        harness.drain()


class Forgets(ContinuousBatching):
    def schedule(self) -> StepPlan | None:
        super().schedule()
        return None


def test_a_plan_that_was_built_and_not_returned_is_an_error_and_not_a_hang() -> None:
    harness = harness_of(Forgets)
    core = EngineCore(
        harness.mechanism,
        harness.scheduler,
        harness.executor,
        ManualClock(),
        max_steps_in_flight=2,
        logits_width=10_000,
    )
    harness.mechanism.add(fake_request(0, [1, 2, 3], max_tokens=3))
    with pytest.raises(PlanError, match="did not return"):
        core.step()


def test_a_built_plan_takes_nothing_more() -> None:
    harness = harness_of(ContinuousBatching)
    mechanism = harness.mechanism
    for number in range(2):
        mechanism.add(fake_request(number, [1, 2, 3], max_tokens=3))
    builder = mechanism.begin_plan()
    first = mechanism.policy.pop()
    builder.admit(first, 3)
    assert builder.build() is not None
    for misuse in (
        lambda: builder.schedule(first, 1),
        lambda: builder.admit(mechanism.policy.peek() or first, 3),
        lambda: builder.preempt(first),
        builder.build,
    ):
        with pytest.raises(PlanError, match="built already"):
            misuse()


class PopsAnother(Fcfs):
    """Shows the first and takes the last."""

    def pop(self) -> RequestView:
        view = self.waiting()[-1]
        self.remove(view.request_id)
        return view


def test_a_policy_that_pops_another_request_than_it_showed_is_named() -> None:
    harness = harness_of(ContinuousBatching, PopsAnother())
    for number in range(2):
        harness.add(fake_request(number, [1, 2, 3], max_tokens=3))
    with pytest.raises(RuntimeError, match="PopsAnother"):
        harness.drain()


def test_removed_requests_do_not_pile_up_behind_one_that_waits() -> None:
    policy = Fcfs()
    policy.push(fake_request(0))
    for number in range(1, 5000):
        policy.push(fake_request(number))
        if number > 1:
            policy.remove(number)
    assert len(policy._heap) < 200
    assert [policy.pop().request_id for _ in range(len(policy))] == [0, 1]


@pytest.mark.parametrize("closing", ["num_blocks_missing", "can_schedule", "preemption_candidates"])
def test_what_closes_the_step_for_admission_counts_for_one_that_was_found_admissible_before(closing: str) -> None:
    harness = harness_of(ContinuousBatching, max_num_batched_tokens=100)
    mechanism = harness.mechanism
    harness.add(fake_request(0, [1, 2, 3], max_tokens=9))
    harness.step()
    harness.add(fake_request(1, [4, 5, 6], max_tokens=9))
    (needy,) = mechanism.running
    builder = mechanism.begin_plan()
    waiting = mechanism.policy.pop()
    assert builder.can_admit(waiting, 3)
    if closing == "preemption_candidates":
        builder.preemption_candidates(needy)
    elif closing == "can_schedule":
        assert not builder.can_schedule(needy, 90)
    else:
        assert builder.num_blocks_missing(needy, 90) > 0
    assert builder.num_tokens_wanted(needy) == 1
    with pytest.raises(PlanError, match="running requests wait for blocks"):
        builder.admit(waiting, 3)
    assert not builder.can_admit(waiting, 3)
