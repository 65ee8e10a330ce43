"""Policies whose order moves while requests wait, against slow oracles that say it from the definition; and nobody starves."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotswap.core.clock import ManualClock
from hotswap.core.request import Request
from hotswap.core.testing.scheduling_harness import fake_request
from hotswap.plugins.schedulers.policies.keyed_queue import KeyedQueue
from hotswap.plugins.schedulers.policies.length_predictor import TRUST_AFTER
from hotswap.plugins.schedulers.policies.longest_prefix import LongestPrefix, LongestPrefixOptions
from hotswap.plugins.schedulers.policies.mlfq import Mlfq, MlfqOptions
from hotswap.plugins.schedulers.policies.queued import QueuedPolicy
from hotswap.plugins.schedulers.policies.shortest_first import REORDERED_PER_STEP, ShortestFirst, ShortestFirstOptions

quick = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

WEIGHTS = {"push": 6, "pop": 5, "step": 4, "wait": 3, "remove": 1, "run": 4, "preempt": 3, "finish": 2}
LONG_PLAYS = st.tuples(st.integers(0, 2**32), st.integers(50, 300))


def operations(seed: int, count: int) -> list[tuple[str, Any]]:
    """What happens to a policy, in random order: long, since an order goes wrong only after a history."""
    source = random.Random(seed)
    arguments: dict[str, Callable[[], Any]] = {
        "push": lambda: {
            "length": source.randint(1, 60),
            "hint": source.randint(0, 50),
            "user": source.choice(("", "alice", "bob")),
            "max_tokens": source.randint(1, 40),
        },
        "pop": lambda: source.random() < 0.2,  # it is set aside and comes back
        "step": lambda: source.randint(0, 50),  # whoever is looked up is found to have so many in the cache
        "wait": lambda: source.choice((0.25, 0.5, 2.0)),
        "run": lambda: (source.randrange(30), source.randint(1, 20)),
    }
    names = source.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    return [(name, arguments.get(name, lambda: source.randrange(30))()) for name in names]


class Oracle:
    """Who goes next, found by looking at everybody. Subclasses say by what."""

    def key(self, request: Request) -> tuple[float, ...]:
        raise NotImplementedError

    def __init__(self, patience: float | None) -> None:
        self.patience = patience
        self.now = 0.0
        self.waiting: list[Request] = []  # by age in the queue
        self.keys: dict[int, tuple[float, ...]] = {}
        self.since: dict[int, float] = {}

    def push(self, request: Request, now: float) -> None:
        self.now = now
        self.waiting.append(request)
        self.keys[request.request_id] = self.key(request)
        self.since[request.request_id] = self.waits_since(request)

    def waits_since(self, request: Request) -> float:
        return request.arrival_time

    def first(self) -> Request | None:
        late = [r for r in self.waiting if self.is_overdue(r)]
        if late:
            return min(late, key=lambda r: (self.since[r.request_id], r.request_id))
        return min(self.waiting, key=lambda r: (self.keys[r.request_id], r.request_id), default=None)

    def is_overdue(self, request: Request) -> bool:
        return self.patience is not None and self.now - self.since[request.request_id] >= self.patience

    def step(self, now: float, looked_up: list[Request]) -> None:
        self.now = now

    def popped(self, request: Request) -> None:
        self.waiting.remove(request)

    def ran(self, request: Request, num_tokens: int) -> None: ...

    def finished(self, request: Request) -> None: ...


class PrefixOracle(Oracle):
    def key(self, request: Request) -> tuple[float, ...]:
        if request.num_preemptions:
            return 0, 0, request.arrival_time
        return 1, -request.num_cached_prompt_tokens, request.arrival_time

    def step(self, now: float, looked_up: list[Request]) -> None:
        super().step(now, looked_up)
        self.keys |= {request.request_id: self.key(request) for request in looked_up}


@dataclass
class Lengths:
    """Every length that was learnt."""

    of: list[tuple[str, int, int]] = field(default_factory=list)

    def mean(self, memory: int, wanted: Callable[[str, int], bool]) -> tuple[float, int]:
        mean, count = 0.0, 0
        for user, bucket, length in self.of:
            if wanted(user, bucket):
                count = min(count + 1, memory)
                mean = mean * (count - 1) / count + length / count
        return mean, count


class ShortestOracle(Oracle):
    def __init__(self, options: ShortestFirstOptions) -> None:
        super().__init__(None)
        self.options = options
        self.lengths = Lengths()

    def key(self, request: Request) -> tuple[float, ...]:
        bucket = len(f"{request.num_prompt_tokens:b}")
        overall, num_ended = self.lengths.mean(self.options.memory, lambda *_: True)
        mean, count = self.lengths.mean(self.options.memory, lambda *name: name == (request.user, bucket))
        share = count / (count + TRUST_AFTER)
        predicted = overall * (1 - share) + mean * share if num_ended else request.max_tokens
        predicted = min(predicted, request.max_tokens)
        produced = request.num_output_tokens
        left = predicted - produced if predicted > produced else produced
        prompt = request.num_prompt_tokens + produced - request.num_cached_prompt_tokens
        work = self.options.prompt_weight * prompt + min(left, request.max_tokens - produced)
        return (round(work + self.options.tokens_per_second * request.arrival_time, 6),)

    def step(self, now: float, looked_up: list[Request]) -> None:
        some, rest = self.waiting[:REORDERED_PER_STEP], self.waiting[REORDERED_PER_STEP:]
        self.keys |= {request.request_id: self.key(request) for request in some}
        self.waiting = rest + some

    def finished(self, request: Request) -> None:
        if request.num_output_tokens:
            bucket = len(f"{request.num_prompt_tokens:b}")
            self.lengths.of.append((request.user, bucket, request.num_output_tokens))


class LevelsOracle(Oracle):
    def __init__(self, options: MlfqOptions) -> None:
        super().__init__(options.promote_after_seconds)
        self.options = options
        self.joined: dict[int, int] = {}
        self.services: dict[int, list[float]] = {}  # since it joined that level

    def join(self, request: Request) -> None:
        if request.request_id not in self.joined:
            tokens = request.num_prompt_tokens + request.num_output_tokens - request.num_cached_prompt_tokens
            level = 0
            while self.options.prompt_weight * tokens > self.quantum(level) and level < self.options.levels - 1:
                level += 1
            self.joined[request.request_id], self.services[request.request_id] = level, []

    def quantum(self, level: int) -> float:
        return float(self.options.quantum * 2**level)

    def level(self, request: Request) -> int:
        self.join(request)
        level, used = self.joined[request.request_id], 0.0
        for service in self.services[request.request_id]:
            used += service
            while used > self.quantum(level) and level < self.options.levels - 1:
                used -= self.quantum(level)
                level += 1
        return level

    def key(self, request: Request) -> tuple[float, ...]:
        return self.level(request), request.arrival_time

    def waits_since(self, request: Request) -> float:
        return self.now if request.num_preemptions else request.arrival_time

    def popped(self, request: Request) -> None:
        if self.is_overdue(request):
            self.joined[request.request_id], self.services[request.request_id] = 0, []
        super().popped(request)

    def ran(self, request: Request, num_tokens: int) -> None:
        self.join(request)
        self.services[request.request_id].append(1 if num_tokens == 1 else self.options.prompt_weight * num_tokens)


class World:
    """Plays the engine's part towards a policy and its oracle."""

    def __init__(self, policy: QueuedPolicy[Any], oracle: Oracle, clock: ManualClock) -> None:
        self.policy, self.oracle, self.clock = policy, oracle, clock
        self.running: list[Request] = []
        self.num_requests = 0

    def play(self, seed: int, count: int) -> None:
        for name, argument in operations(seed, count):
            getattr(self, name)(argument)
            self.compare()
        while len(self.policy):
            self.pop(False)
            self.compare()

    def compare(self) -> None:
        assert self.policy.peek() is self.oracle.first()
        assert len(self.policy) == len(self.oracle.waiting)
        assert {view.request_id for view in self.policy.waiting()} == {r.request_id for r in self.oracle.waiting}

    def push(self, fields: dict[str, Any]) -> None:
        request = fake_request(
            self.num_requests, range(fields["length"]), arrival_time=self.clock.now(), user=fields["user"]
        )
        request.max_tokens = fields["max_tokens"]
        request.num_cached_prompt_tokens = min(fields["hint"], fields["length"] - 1)
        self.num_requests += 1
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        self.policy.push(request)
        self.oracle.push(request, self.clock.now())

    def pop(self, comes_back: bool) -> None:
        expected = self.oracle.first()
        if expected is None:
            return
        assert self.policy.pop() is expected
        self.oracle.popped(expected)
        if comes_back:
            self.enqueue(expected)
        else:
            self.running.append(expected)
            self.schedule(expected, expected.num_prompt_tokens)

    def schedule(self, request: Request, num_tokens: int) -> None:
        request.num_scheduled_tokens += num_tokens
        self.policy.on_scheduled(request, num_tokens)
        self.oracle.ran(request, num_tokens)

    def step(self, hint: int) -> None:
        looked_up = [view for view in self.policy.hints_wanted() if isinstance(view, Request)]
        for request in looked_up:
            if not request.num_preemptions:
                request.num_cached_prompt_tokens = min(hint, request.num_prompt_tokens - 1)
        assert list(self.policy.shed()) == []
        self.oracle.step(self.clock.now(), looked_up)

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def remove(self, place: int) -> None:
        if self.oracle.waiting:
            request = self.oracle.waiting[place % len(self.oracle.waiting)]
            self.policy.remove(request.request_id)
            self.oracle.waiting.remove(request)
            self.policy.on_finish(request)
            self.oracle.finished(request)

    def run(self, argument: tuple[int, int]) -> None:
        place, num_tokens = argument
        if self.running:
            request = self.running[place % len(self.running)]
            for _ in range(min(num_tokens, request.max_tokens - request.num_output_tokens)):
                self.schedule(request, 1)
                request.output_token_ids.append(1)
                self.policy.on_tokens(request, 1)

    def preempt(self, place: int) -> None:
        if self.running:
            request = self.running.pop(place % len(self.running))
            request.num_preemptions += 1
            request.num_scheduled_tokens = 0
            self.enqueue(request)

    def finish(self, place: int) -> None:
        if self.running:
            request = self.running.pop(place % len(self.running))
            self.policy.on_finish(request)
            self.oracle.finished(request)


@quick
@given(play=LONG_PLAYS, window=st.integers(1, 6), lookups=st.integers(0, 4))
def test_longest_prefix_is_what_it_says(play: tuple[int, int], window: int, lookups: int) -> None:
    clock = ManualClock()
    options = LongestPrefixOptions(max_wait_seconds=6.0, window=window, lookups_per_step=lookups)
    World(LongestPrefix(options, clock.now), PrefixOracle(options.max_wait_seconds), clock).play(*play)


class RoundedShortestFirst(ShortestFirst):
    """Sums in another order than the oracle's differ in their last bits."""

    def key(self, view: Any) -> tuple[float]:
        return (round(super().key(view)[0], 6),)


@quick
@given(play=LONG_PLAYS, memory=st.integers(1, 5), rate=st.sampled_from([0.0, 1.0, 20.0]))
def test_shortest_first_is_what_it_says(play: tuple[int, int], memory: int, rate: float) -> None:
    options = ShortestFirstOptions(memory=memory, tokens_per_second=rate)
    World(RoundedShortestFirst(options), ShortestOracle(options), ManualClock()).play(*play)


@quick
@given(play=LONG_PLAYS, quantum=st.sampled_from([1.0, 4.0, 16.0]), levels=st.integers(1, 4))
def test_mlfq_is_what_it_says(play: tuple[int, int], quantum: float, levels: int) -> None:
    clock = ManualClock()
    options = MlfqOptions(quantum=quantum, levels=levels, prompt_weight=0.25, promote_after_seconds=6.0)
    World(Mlfq(options, clock.now), LevelsOracle(options), clock).play(*play)


@quick
@given(ops=st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(0, 4)), max_size=300))
def test_the_queue_is_a_sorted_dict(ops: list[tuple[int, int | None]]) -> None:
    """put (a key) and remove (None), by id; few ids, so that entries grow outdated and are swept."""
    queue: KeyedQueue[tuple[float]] = KeyedQueue()
    views = [fake_request(number) for number in range(13)]
    expected: dict[int, float] = {}
    for number, key in ops:
        if key is not None:
            queue.put(views[number], (float(key),))
            expected[number] = key
        elif number in expected:
            queue.remove(number)
            del expected[number]
        first = min(expected, key=lambda number: (expected[number], number), default=None)
        assert queue.first() is (None if first is None else views[first])
        assert [view.request_id for view in queue.slice(0, 20)] == list(expected)
        assert len(queue._heap) <= 2 * len(expected) + 65


# Nobody starves.


FLOODS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 39), st.sampled_from([0.0, 0.2, 1.0])), min_size=1, max_size=25
)


def serve_a_flood(policy: QueuedPolicy[Any], clock: ManualClock, flood: list[tuple[int, int, float]]) -> float:
    """One long request; two short ones, which find much in the cache, arrive for each that is served. How long the long one
    waited, in seconds; each is served in a quarter."""
    poor = fake_request(0, range(200), arrival_time=clock.now())
    poor.max_tokens = 400
    policy.push(poor)
    numbers = iter(range(1, 10_000))
    for turn in range(4000):
        length, hint, gap = flood[turn % len(flood)]
        for _ in range(2):
            rich = fake_request(next(numbers), range(length), arrival_time=clock.now())
            rich.max_tokens = 1 + hint
            rich.num_cached_prompt_tokens = min(hint, length - 1)
            policy.push(rich)
        list(policy.hints_wanted())
        list(policy.shed())
        served = policy.pop()
        if served is poor:
            return clock.now() - poor.arrival_time
        policy.on_scheduled(served, served.num_prompt_tokens)
        policy.on_finish(served)
        clock.advance(0.25 + gap)
    raise AssertionError("4000 newer requests were served and the long one still waits")


@settings(quick, max_examples=20)
@given(flood=FLOODS)
def test_nobody_starves(flood: list[tuple[int, int, float]]) -> None:
    clock = ManualClock()
    longest_prefix = LongestPrefix(LongestPrefixOptions(max_wait_seconds=7.0), clock.now)
    assert serve_a_flood(longest_prefix, clock, flood) < 7.0 + 1.25
    mlfq = Mlfq(MlfqOptions(quantum=8.0, promote_after_seconds=7.0), clock.now)
    assert serve_a_flood(mlfq, clock, flood) < 7.0 + 1.25


@settings(quick, max_examples=30)
@given(
    rate=st.sampled_from([5.0, 50.0]),
    others=st.lists(st.tuples(st.integers(1, 60), st.floats(0.0, 200.0)), max_size=40),
)
def test_shortest_first_is_passed_only_by_those_that_come_soon(rate: float, others: list[tuple[int, float]]) -> None:
    policy = ShortestFirst(ShortestFirstOptions(tokens_per_second=rate))
    long = fake_request(0, range(100), arrival_time=0.0)
    long.max_tokens = 300
    policy.push(long)
    bound = policy.work(long) / rate
    for number, (length, arrival) in enumerate(sorted(others, key=lambda other: other[1]), 1):
        request = fake_request(number, range(length), arrival_time=arrival)
        request.max_tokens = length
        policy.push(request)
    while (served := policy.pop()) is not long:
        assert served.arrival_time < bound
