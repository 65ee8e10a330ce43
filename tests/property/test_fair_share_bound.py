"""Policy fair_share on the real scheduler: the Virtual Token Counter's bound, a light user beside a flood; a slow oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotswap.core.contracts.policy import Policy
from hotswap.core.request import Request, Status
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fair_share import FairShare, FairShareOptions
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.victims.newest import Newest

quick = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

SEATS = 3
SHAPES = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 10)), min_size=1, max_size=4)


def harness_of(policy: Policy, **settings: Any) -> SchedulingHarness:
    return SchedulingHarness(lambda mechanism: ContinuousBatching(mechanism, policy, Newest()), policy, **settings)


def backlog(policy: Policy, shapes: dict[str, list[tuple[int, int]]], budget: int, depth: int) -> SchedulingHarness:
    """Every user has 24 requests from the start, in its shapes by turns; memory for all that run at once."""
    harness = harness_of(
        policy,
        max_num_seqs=SEATS,
        max_num_batched_tokens=budget,
        max_steps_in_flight=depth,
        num_blocks=40,
        enable_prefix_caching=False,
    )
    number = 0
    for user, own in shapes.items():  # one user's requests all arrive before the next one's
        for place in range(24):
            length, max_tokens = own[place % len(own)]
            harness.add(fake_request(number, [number] * length, user=user, max_tokens=max_tokens))
            number += 1
    return harness


def services(harness: SchedulingHarness, options: FairShareOptions) -> dict[str, float]:
    """Weighted tokens of each user so far over its weight, from what the device and the clients saw."""
    found: dict[str, float] = {}
    prompts: dict[int, int] = {}
    for plan in harness.plans:
        for row in plan.scheduled:
            length = harness.requests[row.request_id].num_prompt_tokens
            end = min(row.num_scheduled_tokens_before + row.num_tokens, length)
            prompts[row.request_id] = max(prompts.get(row.request_id, 0), end)
    for number, request in harness.requests.items():
        cost = options.input_weight * prompts.get(number, 0)
        cost += options.output_weight * len(harness.confirmed[number].token_ids)
        found[request.user] = found.get(request.user, 0.0) + cost / options.weights.get(request.user, 1.0)
    return found


def widest_gap(harness: SchedulingHarness, options: FairShareOptions) -> float:
    """The largest difference of service between two users over any interval in which all have waiting requests."""
    seen: list[dict[str, float]] = []
    users = {request.user for request in harness.requests.values()}
    while {r.user for r in harness.requests.values() if r.status is Status.WAITING} == users:
        seen.append(services(harness, options))
        harness.schedule()
        if harness.executor.num_in_flight >= harness.max_steps_in_flight:
            harness.confirm()
    gaps = []
    for one in users:
        for other in users:
            lead = [service[one] - service[other] for service in seen]
            gaps.append(max(lead) - min(lead))
    return max(gaps)


@quick
@given(
    heavy=SHAPES,
    light=SHAPES,
    budget=st.integers(4, 40),
    depth=st.integers(1, 2),
    prices=st.tuples(st.sampled_from([0.5, 1.0]), st.sampled_from([1.0, 2.0])),
    weight=st.sampled_from([1.0, 1.0, 3.0]),
)
def test_two_backlogged_users_get_alike(
    heavy: list[tuple[int, int]],
    light: list[tuple[int, int]],
    budget: int,
    depth: int,
    prices: tuple[float, float],
    weight: float,
) -> None:
    options = FairShareOptions(input_weight=prices[0], output_weight=prices[1], weights={"heavy": weight})
    harness = backlog(FairShare(options), {"heavy": heavy, "light": light}, budget, depth)
    longest = max(length for length, _ in heavy + light)
    most = max(max_tokens for _, max_tokens in heavy + light)
    apart = options.input_weight * longest + options.output_weight * SEATS * most
    assert apart <= max(options.input_weight * longest, options.output_weight * SEATS * (longest + most))  # the paper's
    assert widest_gap(harness, options) <= 2 * apart + 1e-6


def test_by_arrival_the_bound_does_not_hold() -> None:
    """Else the test above would say nothing."""
    options = FairShareOptions()
    shapes = {"heavy": [(20, 8)], "light": [(20, 8)]}
    bound = 2 * (20 + 2 * SEATS * 8)
    assert widest_gap(backlog(Fcfs(), shapes, 16, 2), options) > 2 * bound
    assert widest_gap(backlog(FairShare(options), shapes, 16, 2), options) <= bound


def test_a_weight_is_a_share() -> None:
    """Tokens, not tokens over weight: three times the weight, three times the tokens."""
    options = FairShareOptions(weights={"heavy": 3.0})
    harness = backlog(FairShare(options), {"heavy": [(6, 4)], "light": [(6, 4)]}, 16, 2)
    widest_gap(harness, options)
    tokens = services(harness, FairShareOptions())
    assert 2.0 < tokens["heavy"] / tokens["light"] < 4.0


def flooded(policy: Policy, depth: int, **settings: Any) -> SchedulingHarness:
    """Thousands of requests of one user wait, and some run."""
    harness = harness_of(policy, max_num_batched_tokens=24, max_steps_in_flight=depth, num_blocks=200, **settings)
    harness._audit = lambda: None  # type: ignore[method-assign]  # it looks at every request, in each step
    for number in range(3000):
        harness.add(fake_request(number, [number % 50] * 9, user="flood", max_tokens=3))
    for _ in range(10):
        harness.step()
    return harness


def num_steps_waited(harness: SchedulingHarness, request: Request, most: int) -> int:
    """How many steps are planned until the one that it is in. most: more are not waited for."""
    before = len(harness.plans)
    harness.add(request)
    for _ in range(most):
        if request.status is not Status.WAITING:
            break
        harness.step()
    assert request.status is not Status.WAITING
    joined = next(
        i for i, plan in enumerate(harness.plans) if request.request_id in [new.request_id for new in plan.new]
    )
    return joined - before


@pytest.mark.parametrize("depth", [1, 2])
def test_a_light_user_waits_at_most_two_steps_beside_a_flood(depth: int) -> None:
    """As long as a seat is free. It comes again and again."""
    harness = flooded(FairShare(FairShareOptions()), depth, max_num_seqs=20)
    for number in range(5000, 5020):
        assert num_steps_waited(harness, fake_request(number, [number] * 5, user="light", max_tokens=2), 5) <= 2
        for _ in range(6):
            harness.step()
            assert harness.mechanism.num_running < 20


def test_when_the_flood_has_all_seats_a_light_user_waits_for_one() -> None:
    """Only waiting is ordered: whoever runs is not stopped. The next seat is the light user's."""
    harness = flooded(FairShare(FairShareOptions()), 2, max_num_seqs=3)
    light = fake_request(5000, [7] * 5, user="light", max_tokens=2)
    ended = len(harness.ended)
    assert num_steps_waited(harness, light, 5) > 0
    joined = next(plan for plan in harness.plans if light.request_id in [new.request_id for new in plan.new])
    assert joined.new[0].request_id == light.request_id and len(harness.ended) > ended


# The order, said from the definition.


class Oracle:
    """Counters as the paper has them, by looking at everybody."""

    def __init__(self, options: FairShareOptions) -> None:
        self.options = options
        self.counters: dict[str, float] = {}
        self.waiting: list[Request] = []
        self.last = ""

    def level(self) -> float:
        waiting = [self.counters[r.user] for r in self.waiting]
        return min(waiting) if waiting else self.counters.get(self.last, 0.0)

    def push(self, request: Request) -> None:
        user = request.user
        if all(r.user != user for r in self.waiting):
            self.counters[user] = max(self.counters.get(user, 0.0), self.level())
        self.waiting.append(request)

    def may_be_first(self) -> list[Request]:
        """The oldest of each user with the smallest counter: who of those comes first is not the paper's to say."""
        least = [r for r in self.waiting if self.counters[r.user] == self.level()]
        users = {r.user for r in least}
        return [
            min((r for r in least if r.user == user), key=lambda r: (r.arrival_time, r.request_id)) for user in users
        ]

    def leave(self, request: Request) -> None:
        self.waiting.remove(request)
        if all(r.user != request.user for r in self.waiting):
            self.last = request.user

    def charge(self, user: str, cost: float) -> None:
        self.counters[user] += cost / self.options.weights.get(user, 1.0)


def play(seed: int, count: int) -> None:
    """Whole tokens and weights that are powers of two, so that sums are exact."""
    source = random.Random(seed)
    options = FairShareOptions(input_weight=0.5, output_weight=2.0, weights={"u1": 2.0, "u2": 0.5})
    policy, oracle = FairShare(options), Oracle(options)
    live: list[Request] = []
    running: list[Request] = []
    paid: dict[int, int] = {}
    for number in range(count):
        what = source.choices(("push", "pop", "run", "preempt", "finish", "remove"), (5, 4, 5, 1, 2, 1))[0]
        if what == "push":
            request = fake_request(number, range(source.randint(1, 12)), user=f"u{source.randrange(5)}")
            live.append(request)
            policy.push(request)
            oracle.push(request)
        elif what == "pop" and oracle.waiting:
            shown = policy.peek()
            request = next(r for r in oracle.waiting if r is shown)
            assert policy.pop() is request
            oracle.leave(request)
            running.append(request)
        elif what == "run" and running:
            request = source.choice(running)
            length, before = request.num_prompt_tokens, request.num_scheduled_tokens
            chunk = min(source.randint(1, 6), max(1, length + request.num_output_tokens - before))
            request.num_scheduled_tokens += chunk
            policy.on_scheduled(request, chunk)
            new = max(0, min(request.num_scheduled_tokens, length) - max(before, paid.get(request.request_id, 0)))
            paid[request.request_id] = paid.get(request.request_id, 0) + new
            oracle.charge(request.user, 0.5 * new)
            if request.num_scheduled_tokens >= length + request.num_output_tokens:
                request.output_token_ids.append(1)
                policy.on_tokens(request, 1)
                oracle.charge(request.user, 2.0)
        elif what == "preempt" and running:
            request = running.pop(source.randrange(len(running)))
            request.num_scheduled_tokens, request.num_preemptions = 0, request.num_preemptions + 1
            policy.push(request)
            oracle.push(request)
        elif what == "finish" and running:
            request = running.pop(source.randrange(len(running)))
            live.remove(request)
            policy.on_finish(request)
        elif what == "remove" and oracle.waiting:
            request = source.choice(oracle.waiting)
            live.remove(request)
            policy.remove(request.request_id)
            oracle.leave(request)
            policy.on_finish(request)
        first = policy.peek()
        assert any(first is request for request in oracle.may_be_first()) or (first is None and not oracle.waiting)
        assert len(policy) == len(oracle.waiting)
        assert {view.request_id for view in policy.waiting()} == {r.request_id for r in oracle.waiting}
        assert len(policy._live) == len(live)


@settings(quick, max_examples=40)
@given(seed=st.integers(0, 2**32), count=st.integers(50, 300))
def test_fair_share_is_what_it_says(seed: int, count: int) -> None:
    play(seed, count)
