"""Policies fair_share and deadline and victim rule fewest_blocks_lost: at their edges, and what they are for."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from hotswap.core.clock import ManualClock
from hotswap.core.contracts.policy import Policy
from hotswap.core.request import Request
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.deadline import MIN_LEARNT, Deadline, DeadlineOptions, PrefillEstimate
from hotswap.plugins.schedulers.policies.fair_share import MAX_IDLE_USERS, FairShare, FairShareOptions
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.victims.fewest_blocks_lost import FewestBlocksLost
from hotswap.plugins.schedulers.victims.newest import Newest

# fair_share


def fair_share(**options: Any) -> FairShare:
    return FairShare(FairShareOptions(**options))


def waiting(number: int, user: str = "", length: int = 4, **fields: Any) -> Request:
    request = fake_request(number, range(length), user=user, **fields)
    request.max_tokens = 16
    return request


def compute(policy: Policy, request: Request, num_tokens: int) -> None:
    request.num_scheduled_tokens += num_tokens
    policy.on_scheduled(request, num_tokens)


def produce(policy: Policy, request: Request, count: int = 1) -> None:
    for _ in range(count):
        request.output_token_ids.append(1)
        policy.on_tokens(request, 1)


def test_prompts_are_charged_by_chunk_and_outputs_when_confirmed() -> None:
    policy = fair_share(input_weight=1.5, output_weight=4.0, weights={"alice": 2.0})
    alice, bob = waiting(0, "alice", 10), waiting(1, "bob", 10)
    for request in (alice, bob):
        policy.push(request)
        policy.pop()
    compute(policy, alice, 6)
    assert policy.counter("alice") == 4.5
    for request, chunk in ((alice, 4), (bob, 10)):
        compute(policy, request, chunk)
        produce(policy, request)
        compute(policy, request, 1)  # the token that was drawn is paid for
    assert (policy.counter("alice"), policy.counter("bob")) == (9.5, 19.0)


def test_nothing_is_charged_twice_or_for_nothing() -> None:
    """What preemption makes the engine compute again, and what the prefix cache saves."""
    policy = fair_share()
    request = waiting(0, "alice", 20)
    policy.push(request)
    policy.pop()
    request.num_scheduled_tokens = 8  # found in the cache
    compute(policy, request, 5)
    assert policy.counter("alice") == 5.0
    request.num_scheduled_tokens, request.num_preemptions = 0, 1
    policy.push(request)
    policy.pop()
    compute(policy, request, 20)
    assert policy.counter("alice") == 12.0  # from token 13 on
    produce(policy, request, 3)
    request.num_scheduled_tokens = 0
    policy.push(request)
    policy.pop()
    compute(policy, request, 23)
    assert policy.counter("alice") == 18.0


def test_what_ran_under_another_policy_has_paid_for_its_prompt() -> None:
    policy = fair_share()
    request = waiting(0, "alice", 20)
    request.output_token_ids, request.num_preemptions = [1, 2], 1
    policy.push(request)
    policy.pop()
    compute(policy, request, 22)
    produce(policy, request)
    assert policy.counter("alice") == 2.0


@pytest.mark.parametrize("ends", [True, False])
def test_idling_saves_no_credit(ends: bool) -> None:
    """Whether the user was forgotten or is still known, as one that has a request running."""
    policy = fair_share()
    policy.push(waiting(0, "idle"))
    request = policy.pop()
    if ends:
        policy.on_finish(request)
    flood = [waiting(number, "busy") for number in range(1, 4)]
    for request in flood:
        policy.push(request)
    policy.pop()
    compute(policy, flood[0], 4)
    produce(policy, flood[0], 50)
    policy.push(waiting(9, "idle"))
    assert policy.counter("idle") == policy.counter("busy") == 104.0


def test_coming_back_to_an_empty_queue_saves_no_credit_either() -> None:
    policy = fair_share()
    busy = waiting(0, "busy")
    policy.push(busy)
    policy.pop()
    compute(policy, busy, 4)
    produce(policy, busy, 10)
    policy.push(waiting(1, "new"))
    assert policy.counter("new") == 24.0


def test_equals_take_turns_and_within_a_user_arrival_counts() -> None:
    policy = fair_share()
    for number, user in enumerate(("a", "a", "b", "b", "c")):
        policy.push(waiting(number, user))
    assert [policy.pop().request_id for _ in range(5)] == [0, 2, 4, 1, 3]
    again = waiting(1, "a")
    again.num_preemptions = 1
    policy.push(waiting(7, "a"))
    policy.push(again)
    assert policy.pop() is again


def test_a_user_that_is_ahead_is_remembered_until_the_others_have_caught_up() -> None:
    policy = fair_share()
    ahead, other = waiting(0, "ahead"), waiting(1, "other")
    policy.push(ahead)
    policy.push(other)
    policy.pop()
    compute(policy, ahead, 4)
    produce(policy, ahead, 8)
    policy.on_finish(ahead)
    policy.push(waiting(2, "ahead"))
    assert policy.counter("ahead") == 20.0 and policy.peek() is other
    policy.pop()
    policy.on_finish(policy.pop())
    compute(policy, other, 4)
    produce(policy, other, 30)
    policy.push(waiting(3, "other"))
    policy.on_finish(other)
    assert set(policy._users) == {"other"}, "it would start where the others are, remembered or not"


def test_users_made_up_by_clients_do_not_fill_memory() -> None:
    policy = fair_share()
    policy.push(waiting(0, "regular"))
    for number in range(1, 2 * MAX_IDLE_USERS):
        request = waiting(number, f"user {number}")
        policy.push(request)
        policy.remove(number)
        compute(policy, request, 4)
        policy.on_finish(request)
    assert len(policy._users) <= MAX_IDLE_USERS + 1
    assert len(policy._heap) < 100 and not policy._live.keys() - {0}


# deadline


def timely(clock: ManualClock, **options: Any) -> Deadline:
    return Deadline(DeadlineOptions(**options), clock.now)


def teach(policy: Deadline, clock: ManualClock, seconds_per_token: float = 0.01, count: int = MIN_LEARNT) -> None:
    """So many requests of different lengths have their first token."""
    for number in range(count):
        request = waiting(1000 + number, length=50 + 10 * number, arrival_time=clock.now())
        policy.push(request)
        policy.remove(request.request_id)
        compute(policy, request, request.num_prompt_tokens)
        clock.advance(seconds_per_token * request.num_prompt_tokens)
        produce(policy, request)
        policy.on_finish(request)


def under_way(policy: Deadline) -> Request:
    """Somebody is being computed."""
    request = waiting(999, length=10)
    compute(policy, request, 1)
    return request


def test_nothing_is_refused_before_anything_is_known() -> None:
    clock = ManualClock()
    policy = timely(clock)
    policy.push(waiting(0, arrival_time=0.0))
    clock.advance(1000.0)
    assert list(policy.shed()) == []
    teach(policy, clock, count=MIN_LEARNT - 1)
    assert list(policy.shed()) == []
    teach(policy, clock, count=1)
    (shed,) = policy.shed()
    assert shed.request_id == 0 and len(policy) == 1, "the scheduler takes it out"
    policy.remove(0)
    assert len(policy) == 0


def test_what_can_no_longer_make_it_is_refused_and_is_told_why() -> None:
    clock = ManualClock()
    policy = timely(clock, ttft_seconds=2.0)
    teach(policy, clock)
    under_way(policy)
    start = clock.now()
    policy.push(waiting(1, length=100, arrival_time=start))  # needs a second
    clock.advance(0.9)
    assert list(policy.shed()) == []
    clock.advance(0.2)
    (late,) = policy.shed()
    assert (late.request_id, late.status) == (1, 429)
    assert late.reason.startswith("the first token was to be there 2.00 s after the request arrived")
    assert re.search(r"has waited 1\.10 s and needs about 1\.0\d s more\. The server is overloaded: try", late.reason)
    policy.remove(1)
    policy.push(waiting(2, length=400, arrival_time=clock.now()))
    (long,) = policy.shed()
    assert long.status == 503 and "even without a queue" in long.reason


def test_an_estimate_that_is_wrong_is_put_right() -> None:
    """The first ones took ten seconds each (something was compiled): the server goes on, and forgets them."""
    clock = ManualClock()
    policy = timely(clock, ttft_seconds=2.0)
    teach(policy, clock, seconds_per_token=0.1)
    served = []
    for number in range(100):
        request = waiting(number, length=50, arrival_time=clock.now())
        policy.push(request)
        assert list(policy.shed()) == [], "nobody else is under way: whoever is in time is served"
        policy.pop()
        compute(policy, request, 50)
        clock.advance(0.05)
        policy.push(waiting(500 + number, length=50, arrival_time=clock.now()))
        served.append(not list(policy.shed()))
        policy.remove(500 + number)
        produce(policy, request)
        policy.on_finish(request)
    assert not any(served[:5]) and all(served[50:])


def test_whoever_ran_is_not_refused_and_keeps_its_place() -> None:
    clock = ManualClock()
    policy = timely(clock, ttft_seconds=2.0, tpot_seconds=0.5)
    teach(policy, clock)
    ran = waiting(0, arrival_time=clock.now())
    policy.push(ran)
    policy.pop()
    compute(policy, ran, 4)
    produce(policy, ran, 3)
    ran.num_preemptions, ran.num_scheduled_tokens = 1, 0
    policy.push(ran)
    start = clock.now()
    policy.push(waiting(1, arrival_time=start + 1.0))
    policy.push(waiting(2, arrival_time=start + 2.0))
    assert policy.due(ran) == start + 3.5
    clock.advance(100.0)
    assert [shed.request_id for shed in policy.shed()] == [1, 2]
    assert [policy.pop().request_id for _ in range(3)] == [1, 0, 2]


def test_a_deadline_of_its_own_goes_before_the_default() -> None:
    clock = ManualClock()
    policy = timely(clock, ttft_seconds=2.0)
    for number, deadline in enumerate((None, 9.0, 1.0)):
        request = waiting(number, arrival_time=0.0)
        request.deadline = deadline
        policy.push(request)
    assert [policy.pop().request_id for _ in range(3)] == [2, 0, 1]


def test_the_estimate_is_a_line_that_follows() -> None:
    estimate = PrefillEstimate()
    assert estimate.seconds(100) == 0.0
    for turn in range(200):
        estimate.learn(10 + turn * 37 % 500, 0.3 + 0.002 * (10 + turn * 37 % 500))
    assert estimate.seconds(1000) == pytest.approx(2.3) and estimate.seconds(0) == pytest.approx(0.3)
    for turn in range(800):
        estimate.learn(10 + turn * 37 % 500, 0.1 + 0.004 * (10 + turn * 37 % 500))
    assert estimate.seconds(1000) == pytest.approx(4.1, rel=0.01) and estimate.error < 0.01


def test_lengths_that_are_all_alike_say_nothing_about_others() -> None:
    estimate = PrefillEstimate()
    for _ in range(50):
        estimate.learn(100, 0.5)
    assert estimate.seconds(10_000) == estimate.seconds(100) == pytest.approx(0.5)


TTFT, TPOT = 1.0, 0.1


def goodput(make: Callable[[ManualClock], Policy], rate: float, count: int, own_deadlines: bool = False) -> float:
    """Requests a second that meet their SLO, on a device that takes 20 ms a step and half a millisecond a token."""
    source, clock = random.Random(3), ManualClock()
    policy = make(clock)
    harness = SchedulingHarness(
        lambda mechanism: ContinuousBatching(mechanism, policy, Newest()),
        policy,
        num_blocks=260,
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_model_len=256,
        enable_prefix_caching=False,
    )
    arrivals, now = [], 0.0
    for number in range(count):
        now += source.expovariate(rate)
        length, max_tokens = source.choice((16, 40, 160)), source.randint(4, 24)
        request = fake_request(number, [number] * length, arrival_time=now, max_tokens=max_tokens)
        request.deadline = now + source.choice((0.4, 4.0)) if own_deadlines else None
        arrivals.append(request)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    ends: list[float] = []
    pending = arrivals[::-1]
    while pending or harness.mechanism.num_unfinished or harness.executor.num_in_flight:
        while pending and pending[-1].arrival_time <= clock.now():
            harness.add(pending.pop())
        while (plan := harness.schedule()) is not None:
            ends.append(max([clock.now(), *ends[-1:]]) + 0.02 + 0.0005 * plan.num_tokens)
        if not ends:
            clock.advance_to(max(clock.now(), pending[-1].arrival_time) if pending else clock.now() + 0.01)
            continue
        clock.advance_to(max(clock.now(), ends.pop(0)))
        for update in harness.confirm():
            if update.new_token_ids:
                first.setdefault(update.request_id, clock.now())
                last[update.request_id] = clock.now()
    met = 0
    for request in arrivals:
        ended = harness.ended[request.request_id]
        if ended.finish_reason == "length":
            due = request.arrival_time + TTFT if request.deadline is None else request.deadline
            started = first[request.request_id]
            pace = (last[request.request_id] - started) / max(1, len(ended.token_ids) - 1)
            met += started <= due and pace <= TPOT
    return met / clock.now()


def compared(rate: float, count: int, **options: Any) -> tuple[float, float]:
    return (
        goodput(lambda clock: timely(clock, ttft_seconds=TTFT, tpot_seconds=TPOT), rate, count, **options),
        goodput(lambda clock: Fcfs(), rate, count, **options),
    )


def test_at_overload_more_requests_meet_their_slo_than_by_arrival() -> None:
    by_deadline, by_arrival = compared(rate=22.0, count=160)
    assert by_deadline > 1.5 * by_arrival


def test_at_low_load_it_is_as_good_as_by_arrival() -> None:
    by_deadline, by_arrival = compared(rate=4.0, count=60)
    assert by_deadline == by_arrival > 3.0


def test_tight_and_loose_deadlines_are_both_met() -> None:
    """Near capacity nobody need be refused: the order alone does it."""
    by_deadline, by_arrival = compared(rate=17.0, count=120, own_deadlines=True)
    assert by_deadline > 1.1 * by_arrival


@pytest.mark.parametrize("seed", range(5))
def test_the_order_is_that_of_due_times(seed: int) -> None:
    """Against sorting all of them each time; first in the queue and last may be refused or aborted."""
    source, clock = random.Random(seed), ManualClock()
    policy = timely(clock, ttft_seconds=3.0, tpot_seconds=0.25)
    teach(policy, clock)
    expected: dict[int, Request] = {}
    for number in range(400):
        what = source.random()
        if what < 0.5:
            request = waiting(number, length=source.randint(1, 80), arrival_time=clock.now())
            request.deadline = source.choice((None, clock.now() + source.uniform(0.0, 9.0)))
            request.num_preemptions = source.randrange(2)
            request.output_token_ids = [1] * (source.randrange(9) * request.num_preemptions)
            policy.push(request)
            expected[number] = request
        elif what < 0.7 and expected:
            number = source.choice(list(expected))
            policy.remove(number)
            del expected[number]
        elif what < 0.8:
            clock.advance(0.3)
            late = {r.request_id for r in expected.values() if not r.num_preemptions and policy.due(r) < clock.now()}
            given_up = [shed.request_id for shed in policy.shed()]
            assert set(given_up) == late, "nobody is under way: only what is late for certain"
            for number in given_up:
                policy.remove(number)
                del expected[number]
        elif expected:
            first = min(expected.values(), key=lambda r: (policy.due(r), r.arrival_time, r.request_id))
            assert policy.pop() is first
            del expected[first.request_id]
        assert len(policy) == len(expected)


# fewest_blocks_lost


def running(number: int, computed: int, cached: int = 0, arrival_time: float | None = None) -> Request:
    request = fake_request(number, range(max(computed, 1)), arrival_time=arrival_time)
    request.num_computed_tokens = request.num_scheduled_tokens = computed
    request.num_cached_prompt_tokens = cached
    request.block_ids = list(range(1, 1 - (-computed // 4)))
    return request


@pytest.mark.parametrize(
    ("candidates", "needed", "chosen"),
    [
        ([running(0, 12), running(1, 8), running(2, 40)], 1, 1),
        ([running(0, 12), running(1, 8), running(2, 40)], 3, 0),  # request 1 would not free enough
        ([running(0, 12), running(1, 8), running(2, 40)], 11, 1),  # nobody does: the cheapest, and the core asks again
        ([running(0, 20, cached=16), running(1, 12)], 1, 0),  # four tokens are lost, the others are in the cache
        ([running(0, 20, cached=16), running(1, 12)], 2, 1),  # but they are shared: one block comes free
        ([running(0, 8, arrival_time=1.0), running(1, 8, arrival_time=3.0), running(2, 8, arrival_time=2.0)], 1, 1),
        ([running(0, 8, arrival_time=1.0), running(1, 8, arrival_time=1.0)], 1, 1),
        (
            [running(0, 4), running(1, 4, cached=8)],
            1,
            0,
        ),  # preempted once, it has computed less than the cache once gave
    ],
)
def test_whoever_loses_the_least_yields(candidates: list[Request], needed: int, chosen: int) -> None:
    assert FewestBlocksLost(4).choose(candidates, needed).request_id == chosen


def test_fewer_tokens_are_computed_again_than_by_arrival() -> None:
    """A long request that came late is not thrown away for one that needs a block."""
    computed = {}
    for rule in (Newest(), FewestBlocksLost(4)):
        policy = Fcfs()
        harness = SchedulingHarness(
            lambda mechanism, policy=policy, rule=rule: ContinuousBatching(mechanism, policy, rule),  # type: ignore[misc]
            policy,
            num_blocks=22,
            max_model_len=80,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
        )
        for number, length in enumerate((8, 8, 48)):
            harness.add(fake_request(number, [number] * length, max_tokens=16))
        harness.drain()
        assert harness.mechanism._state.num_preemptions > 0
        assert all(harness.ended[number].token_ids == harness.expected_tokens(number) for number in range(3))
        computed[type(rule)] = harness.executor.num_tokens_computed
    assert computed[FewestBlocksLost] < computed[Newest]


# All of them.


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        (FairShareOptions, {"input_weight": 0.0}),
        (FairShareOptions, {"output_weight": float("nan")}),
        (FairShareOptions, {"weights": {"alice": -1.0}}),
        (FairShareOptions, {"weight": 2.0}),
        (DeadlineOptions, {"ttft_seconds": 0.0}),
        (DeadlineOptions, {"tpot_seconds": -1.0}),
        (DeadlineOptions, {"ttft": 1.0}),
    ],
)
def test_wrong_options_are_refused(model: type[BaseModel], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model(**wrong)


@pytest.mark.parametrize("name", ["policies.fair_share", "policies.deadline", "victims.fewest_blocks_lost"])
def test_they_use_the_door_that_third_parties_use(name: str) -> None:
    module = importlib.import_module(f"hotswap.plugins.schedulers.{name}")
    origins = {getattr(value, "__module__", "") or "" for value in vars(module).values()}
    assert all(origin.startswith("hotswap.core.contracts") for origin in origins if origin.startswith("hotswap.core"))
