"""Simulated engines: times that can be worked out, what may never be lost, and what a policy is for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from hotswap.core.clock import ManualClock
from hotswap.core.contracts.observer import FinishedRequest
from hotswap.core.contracts.plan import StepPlan
from hotswap.core.contracts.policy import KeyedPolicy, Policy, RequestView
from hotswap.core.scheduling.limits import SchedulingLimits
from hotswap.core.simulator.measures import jain_index, meets, service_rates, summarize, tpot, ttft
from hotswap.core.simulator.replica import EngineSize, Replica, prompt_of
from hotswap.core.simulator.requests import SimulatedRequest, tokens_of
from hotswap.core.simulator.simulation import Outcome, Simulation
from hotswap.core.simulator.step_cost import StepCost, StepWork
from hotswap.core.simulator.synthetic import synthetic_workload
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.policies.priority import Priority
from hotswap.plugins.schedulers.victims.newest import Newest

COST = StepCost(
    weight_seconds=4e-3,
    token_seconds=2e-5,
    row_seconds=1e-6,
    context_seconds=3e-8,
    pair_seconds=8e-10,
    overhead_seconds=3e-4,
)
LIMITS = SchedulingLimits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)
SIZE = EngineSize(LIMITS, num_blocks=2000, block_size=16)


def test_a_clock_is_set_exactly_and_never_back() -> None:
    clock = ManualClock()
    clock.advance_to(0.1 + 0.2)
    assert clock.now() == 0.1 + 0.2
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance_to(0.3)


class Run:
    """A workload through one replica. `outcome`, and the replica as it was left."""

    def __init__(
        self,
        requests: Any,
        *,
        policy: Policy | None = None,
        size: EngineSize = SIZE,
        cost: StepCost = COST,
        max_tokens: int | None = None,
        start: bool = True,
    ) -> None:
        chosen = Fcfs() if policy is None else policy  # an empty queue is false
        simulation = Simulation(requests)
        self.replica = Replica(
            size,
            cost,
            ManualClock(),
            chosen,
            lambda mechanism: ContinuousBatching(mechanism, chosen, Newest()),
            simulation.ended,
            max_tokens=max_tokens,
        )
        if not start:
            return
        self.outcome: Outcome = simulation.run(self.replica)
        self.by_id = {request.request_id: request for request in self.outcome.finished}


def decode_seconds(context: int) -> float:
    return COST.seconds(StepWork(1, 1, context, context))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_one_request_takes_its_prefill_and_its_decodes(in_flight: int) -> None:
    run = Run([SimulatedRequest(5.0, 700, 4)], size=replace(SIZE, max_steps_in_flight=in_flight))
    request = run.by_id[0]
    prefill = COST.seconds(StepWork(700, 1, 700, 700 * 701 // 2))
    assert request.first_scheduled_time == 5.0
    assert ttft(request) == pytest.approx(prefill)
    assert request.finish_time - 5.0 == pytest.approx(prefill + sum(map(decode_seconds, (701, 702, 703))))
    assert run.outcome.totals.num_steps == 4
    assert run.outcome.totals.num_tokens == 703
    assert run.outcome.totals.busy_seconds == pytest.approx(request.finish_time - 5.0)


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    run = Run([SimulatedRequest(0.0, 3000, 1)])
    first = COST.seconds(StepWork(2048, 0, 2048, 2048 * 2049 // 2))
    second = COST.seconds(StepWork(952, 1, 3000, 952 * 2048 + 952 * 953 // 2))
    assert ttft(run.by_id[0]) == pytest.approx(first + second)


def test_a_planned_step_is_not_waited_for_twice() -> None:
    """Two decode together, with one step planned while another runs: the device is never idle between them."""
    run = Run([SimulatedRequest(0.0, 100, 50), SimulatedRequest(0.0, 100, 50)])
    assert run.outcome.totals.num_steps == 50
    assert run.replica.clock.now() == pytest.approx(run.outcome.totals.busy_seconds)


def one_at_a_time(rate: float, count: int) -> Run:
    """A queue with one server: Poisson arrivals, one token each, every service alike."""
    size = replace(SIZE, limits=replace(LIMITS, max_num_seqs=1), max_steps_in_flight=1)
    return Run(synthetic_workload(f"requests={count},rate={rate},prompt=100,output=1").requests, size=size)


def test_waiting_times_are_those_of_the_queue_m_d_1() -> None:
    """Pollaczek and Khinchine: at load r, r / 2(1 - r) services on average."""
    service = COST.seconds(StepWork(100, 1, 100, 5050))
    for load in (0.05, 0.6):
        results = summarize(one_at_a_time(load / service, 3000).outcome)
        assert results.queue is not None
        expected = load / (2 * (1 - load)) * service
        assert results.queue.mean == pytest.approx(expected, rel=0.15, abs=0.01 * service), load
        assert results.busy == pytest.approx(load, rel=0.1)


def test_at_overload_the_queue_grows() -> None:
    service = COST.seconds(StepWork(100, 1, 100, 5050))
    found = one_at_a_time(2 / service, 600).outcome.finished
    each = [(request.first_scheduled_time or 0.0) - request.arrival_time for request in found]
    waits = [sum(each[part : part + 200]) / 200 for part in (0, 200, 400)]
    assert waits[0] < waits[1] < waits[2]
    assert waits[2] > 200 * service


SMALL = EngineSize(replace(LIMITS, max_num_seqs=16, max_num_batched_tokens=256), num_blocks=60, block_size=16)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_every_request_ends_and_no_block_is_lost(in_flight: int, caching: bool) -> None:
    workload = synthetic_workload(
        "requests=150,rate=60,prompt=uniform:1,200,output=uniform:1,200,shared_prefix=40,prefixes=2,turns=2"
    )
    size = replace(SMALL, enable_prefix_caching=caching, max_steps_in_flight=in_flight)
    run = Run(workload.requests, size=size)
    assert run.outcome.totals.num_preemptions > 10
    window = min(4096, 60 * 16)
    fitting = {n for n, r in enumerate(workload.requests) if r.prompt_tokens < window}
    assert run.by_id.keys() == fitting
    assert sum(run.outcome.refused.values()) == len(workload.requests) - len(fitting)
    for number, request in run.by_id.items():
        asked = workload.requests[number]
        assert request.num_prompt_tokens == asked.prompt_tokens
        assert request.num_output_tokens == min(asked.output_tokens, window - asked.prompt_tokens)
        first = request.first_token_time
        assert first is not None and request.first_scheduled_time is not None
        assert request.arrival_time <= request.first_scheduled_time < first <= request.finish_time
    pool = run.replica._core.mechanism.kv.pool
    assert pool.num_free_blocks == pool.num_blocks
    assert run.replica._core.mechanism.num_unfinished == 0
    assert not run.replica._executor._draws
    assert (run.outcome.totals.prefix_hits > 0) == caching


def test_the_same_run_again_is_the_same() -> None:
    workload = synthetic_workload("requests=80,rate=50,prompt=uniform:1,200,output=uniform:1,200,shared_prefix=40")
    assert Run(workload.requests, size=SMALL).outcome == Run(workload.requests, size=SMALL).outcome


@pytest.mark.parametrize("in_flight", [1, 2])
def test_steps_are_those_of_the_real_mechanism_under_the_scripted_executor(in_flight: int) -> None:
    """The harness checks every plan against the blocks that it writes and reads: here the same ones come, in that order."""
    workload = synthetic_workload(
        "requests=40,rate=inf,seed=4,prompt=uniform:1,120,output=uniform:1,80,shared_prefix=40"
    )
    size = replace(SMALL, num_blocks=40, max_steps_in_flight=in_flight)
    run = Run(workload.requests, size=size, start=False)
    plans: list[Any] = []
    execute = run.replica._executor.execute

    def listen(plan: StepPlan) -> None:
        plans.append(rows_of(plan))
        execute(plan)

    run.replica._executor.execute = listen  # type: ignore[method-assign]
    policy = Fcfs()
    harness = SchedulingHarness(
        lambda mechanism: ContinuousBatching(mechanism, policy, Newest()),
        policy,
        num_blocks=size.num_blocks,
        block_size=size.block_size,
        max_steps_in_flight=in_flight,
        limits=size.limits,
    )
    for number, request in enumerate(workload.requests):
        run.replica.submit(number, request, 0.0)
        prompt = tokens_of(prompt_of(request, number, ()))
        harness.add(fake_request(number, prompt, arrival_time=0.0, max_tokens=request.output_tokens, ignore_eos=True))
    while run.replica.has_work:
        run.replica.turn()
    harness.drain()
    assert run.replica.totals().num_preemptions > 0
    assert plans == [rows_of(plan) for plan in harness.plans]


def rows_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(row.request_id, row.num_tokens, row.num_scheduled_tokens_before) for row in plan.scheduled]


def inversions(run: Run) -> int:
    """Pairs in which the worse class was admitted while the better one was there and waited."""
    found = sorted(run.outcome.finished, key=lambda r: r.first_scheduled_time or 0.0)
    return sum(
        better.priority < worse.priority
        and better.arrival_time <= (worse.first_scheduled_time or 0.0)
        and (better.first_scheduled_time or 0.0) > (worse.first_scheduled_time or 0.0)
        for worse, better in itertools.combinations(found, 2)
    )


def test_priority_never_inverts() -> None:
    workload = synthetic_workload("requests=400,rate=80,prompt=uniform:20,200,output=uniform:1,60,priorities=3")
    assert inversions(Run(workload.requests, size=SMALL)) > 100  # under fcfs: the count can find some
    assert inversions(Run(workload.requests, size=SMALL, policy=Priority())) == 0


def test_a_policy_orders_those_that_wait() -> None:
    class LongestFirst(KeyedPolicy):
        def key(self, view: RequestView) -> float:
            return -view.num_prompt_tokens

    size = replace(SIZE, limits=replace(LIMITS, max_num_seqs=1))
    requests = [SimulatedRequest(0.0, length, 3) for length in (50, 10, 90, 70)]
    assert [r.num_prompt_tokens for r in Run(requests, size=size, policy=LongestFirst()).outcome.finished] == [
        90,
        70,
        50,
        10,
    ]
    assert [r.num_prompt_tokens for r in Run(requests, size=size).outcome.finished] == [50, 10, 90, 70]


def test_a_policy_that_waits_for_time_to_pass_is_not_waited_for_forever() -> None:
    class Shy(Fcfs):
        def share(self, view: RequestView, budget: Any) -> int:
            return 0

    run = Run([SimulatedRequest(0.0, 5, 2)], policy=Shy())
    assert run.by_id[0].num_output_tokens == 2


def test_shared_prompts_hit_the_prefix_index_as_far_as_they_agree() -> None:
    """The second comes when the first has ended: 3 blocks of 16 of its 50 shared tokens are there."""
    requests = [
        SimulatedRequest(0.0, 80, 2, shared=((1, 50),)),
        SimulatedRequest(9.0, 80, 2, shared=((1, 50),)),
        SimulatedRequest(18.0, 80, 2, shared=((2, 50),)),
        SimulatedRequest(27.0, 64, 2, shared=((1, 50), (5, 14))),
        SimulatedRequest(36.0, 64, 2, shared=((1, 50), (5, 14))),
    ]
    run = Run(requests)
    cached = [run.by_id[n].num_cached_prompt_tokens for n in range(5)]
    assert cached == [0, 48, 0, 48, 48]  # of the last one 63 tokens could hit: the last is always computed
    assert run.outcome.totals.prefix_hits == 144


def test_a_conversation_waits_for_its_answers_and_finds_them_in_the_cache() -> None:
    requests = [
        SimulatedRequest(0.0, 100, 60, session="s"),
        SimulatedRequest(0.0, 200, 20, session="s"),
        SimulatedRequest(50.0, 230, 5, session="s"),
    ]
    run = Run(requests)
    first, second, third = (run.by_id[n] for n in range(3))
    assert second.arrival_time == first.finish_time
    assert third.arrival_time == 50.0
    assert second.num_cached_prompt_tokens == (100 + 59) // 16 * 16  # the last token drawn has no KV
    assert third.num_cached_prompt_tokens == (200 + 19) // 16 * 16


def test_a_conversation_goes_on_after_a_refused_turn() -> None:
    requests = [SimulatedRequest(0.0, 5000, 1, session="s"), SimulatedRequest(0.0, 10, 1, session="s")]
    run = Run(requests)
    assert run.outcome.refused == {"context_length_exceeded": 1}
    assert run.by_id[1].num_output_tokens == 1


def test_the_length_of_an_answer_can_be_kept_from_the_policy() -> None:
    seen: list[int] = []

    class Watching(Fcfs):
        def push(self, view: RequestView) -> None:
            seen.append(view.max_tokens)
            super().push(view)

    requests = [SimulatedRequest(0.0, 10, 7), SimulatedRequest(0.0, 10, 30)]
    known = Run(requests, policy=Watching())
    assert seen == [7, 30]
    assert {r.finish_reason for r in known.outcome.finished} == {"length"}
    unknown = Run(requests, policy=Watching(), max_tokens=20)
    assert seen[2:] == [20, 20]
    assert [(unknown.by_id[n].num_output_tokens, unknown.by_id[n].finish_reason) for n in (0, 1)] == [
        (7, "stop"),
        (20, "length"),
    ]


# Measures.


def finished(number: int, arrival: float, end: float, *, first: float | None = None, **fields: Any) -> FinishedRequest:
    facts: dict[str, Any] = {
        "finish_reason": "length",
        "num_prompt_tokens": 10,
        "num_output_tokens": 5,
        "num_cached_prompt_tokens": 0,
        "num_preemptions": 0,
        "first_scheduled_time": arrival,
        "user": "",
        "priority": 0,
    }
    return FinishedRequest(
        request_id=number, arrival_time=arrival, first_token_time=first, finish_time=end, **{**facts, **fields}
    )


def test_jains_index() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([1.0, 3.0]) == pytest.approx(0.8)
    assert jain_index([]) == 1.0


def test_service_is_counted_while_a_user_is_there() -> None:
    """a: 30 tokens in the union of [0, 4] and [2, 6] and in [8, 10]; b: 15 in 5 seconds."""
    requests = [
        finished(0, 0.0, 4.0, user="a"),
        finished(1, 2.0, 6.0, user="a"),
        finished(2, 8.0, 10.0, user="a"),
        finished(3, 1.0, 6.0, user="b"),
    ]
    assert service_rates(requests) == pytest.approx({"a": 45 / 8, "b": 3.0})


def test_a_summary_by_hand() -> None:
    requests = [
        finished(0, 1.0, 3.0, first=1.5),
        finished(1, 2.0, 6.0, first=4.0, num_output_tokens=1),
        finished(2, 2.0, 2.5, finish_reason="error", num_output_tokens=0),
    ]
    totals = Run([SimulatedRequest(0.0, 5, 2)]).outcome.totals
    results = summarize(Outcome(requests, {"queue_full": 1}, totals), {"ttft": 1.0})
    assert (results.num_requests, results.num_answered, results.shed) == (4, 2, 1)
    assert results.duration == 5.0
    assert (results.prompt_tokens, results.output_tokens) == (20, 6)
    assert results.output_throughput == pytest.approx(6 / 5)
    assert results.ttft is not None and (results.ttft.min, results.ttft.max) == (0.5, 2.0)
    assert results.tpot is not None and (results.tpot.count, results.tpot.mean) == (1, 1.5 / 4)
    assert results.e2e is not None and results.e2e.mean == 3.0
    assert results.goodput is not None
    assert (results.goodput.count, results.goodput.share, results.goodput.requests_per_second) == (1, 0.25, 0.2)
    assert tpot(requests[1]) is None
    assert meets(requests[1], {"tpot": 0.1, "e2e": 4.0})
    assert not meets(requests[1], {"e2e": 3.9})


def test_a_summary_of_nothing() -> None:
    results = summarize(Run([SimulatedRequest(0.0, 5000, 1)]).outcome, {"ttft": 1.0})
    assert (results.num_requests, results.num_answered, results.ttft, results.duration) == (1, 0, None, 0.0)
    assert results.goodput is not None and results.goodput.count == 0
