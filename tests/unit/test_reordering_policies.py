"""The policies longest_prefix, shortest_first and mlfq: on the real scheduler, at their edges, and what they remember."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from hotswap.core.clock import ManualClock
from hotswap.core.contracts.policy import Budget, Policy, RequestView
from hotswap.core.errors import PlanError
from hotswap.core.kv_cache import KVCacheManager
from hotswap.core.request import Request
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.policies.length_predictor import MAX_GROUPS, LengthPredictor
from hotswap.plugins.schedulers.policies.longest_prefix import LongestPrefix, LongestPrefixOptions
from hotswap.plugins.schedulers.policies.mlfq import Mlfq, MlfqOptions
from hotswap.plugins.schedulers.policies.shortest_first import ShortestFirst, ShortestFirstOptions
from hotswap.plugins.schedulers.victims.newest import Newest


def harness_of(policy: Policy, **settings: Any) -> SchedulingHarness:
    return SchedulingHarness(lambda mechanism: ContinuousBatching(mechanism, policy, Newest()), policy, **settings)


def longest_prefix(**options: Any) -> LongestPrefix:
    return LongestPrefix(LongestPrefixOptions(**options), ManualClock(100.0).now)


def mlfq(**options: Any) -> Mlfq:
    return Mlfq(MlfqOptions(**options), ManualClock().now)


def admitted(harness: SchedulingHarness) -> list[int]:
    return [new.request_id for plan in harness.plans for new in plan.new]


def waiting_request(request_id: int, length: int = 8, max_tokens: int = 16, **fields: Any) -> Request:
    """As the engine queues it."""
    request = fake_request(request_id, range(length), **fields)
    request.max_tokens = max_tokens
    return request


# longest_prefix


def documents(policy: Policy) -> SchedulingHarness:
    """Three documents of 20 tokens, asked about in turn, one seat, and blocks for one document and a question."""
    harness = harness_of(policy, num_blocks=9, max_num_seqs=1, max_model_len=32)
    for number in range(12):
        document = 100 * (number % 3)
        harness.add(fake_request(number, [*range(document, document + 20), 1000 + number], max_tokens=4))
    harness.drain()
    for number in range(12):
        assert harness.ended[number].token_ids == harness.expected_tokens(number)
    return harness


def test_one_document_is_served_to_its_end() -> None:
    by_prefix = documents(longest_prefix(max_wait_seconds=1000.0))
    by_arrival = documents(Fcfs())
    assert admitted(by_arrival) == list(range(12))
    assert admitted(by_prefix) == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert by_prefix.executor.num_tokens_computed < by_arrival.executor.num_tokens_computed / 2


def test_without_patience_it_is_by_arrival() -> None:
    assert admitted(documents(longest_prefix(max_wait_seconds=1.0))) == list(range(12))


def test_hints_of_the_front_of_the_queue_are_kept_fresh() -> None:
    harness = harness_of(longest_prefix(window=4, lookups_per_step=2), max_num_seqs=1, num_blocks=40)
    harness.add(fake_request(0, range(17), max_tokens=12))
    for number in range(1, 7):
        harness.add(fake_request(number, range(17), max_tokens=1))
    for _ in range(8):
        harness.step()
    hints = [harness.requests[number].num_cached_prompt_tokens for number in range(1, 7)]
    assert hints == [16, 16, 16, 16, 0, 0], "the first four were looked up again, the others are as they arrived"
    harness.drain()


def test_a_hint_is_renewed_from_the_one_before() -> None:
    """As long as the prefix is there, longer and gone."""
    kv = KVCacheManager(8, 4)
    waits, computes = waiting_request(0, 23), waiting_request(1, 23)

    def cache(num_tokens: int) -> None:
        kv.open_table(computes, kv.match(computes), num_tokens)
        computes.num_computed_tokens = num_tokens
        kv.index_computed(computes)
        kv.release(computes, after=None)

    def renewed() -> int:
        waits.num_cached_prompt_tokens = kv.renewed_hint(waits)
        assert waits.num_cached_prompt_tokens == kv.hint(waits)
        return waits.num_cached_prompt_tokens

    assert renewed() == 0
    cache(8)
    assert [renewed(), renewed()] == [8, 8]
    cache(20)
    assert renewed() == 20
    taken = kv.pool.allocate(5)  # all but three blocks, the end of the prefix among them
    assert renewed() == 12
    kv.pool.free(taken)
    assert kv.reset_prefix_cache() and renewed() == 0


def test_a_hint_that_holds_costs_the_same_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = KVCacheManager(600, 4)
    computes, waits = waiting_request(0, 2001), waiting_request(1, 2001)
    kv.open_table(computes, [], 2001)
    computes.num_computed_tokens = 2001
    kv.index_computed(computes)
    waits.num_cached_prompt_tokens = kv.hint(waits)
    assert waits.num_cached_prompt_tokens == 2000
    starts: list[int] = []
    original = kv.index.match

    def watched(request: Request, start: int = 0) -> list[int]:
        starts.append(start)
        return original(request, start)

    monkeypatch.setattr(kv.index, "match", watched)
    assert kv.renewed_hint(waits) == 2000
    assert starts == [500]


def test_a_request_that_waited_for_a_prefix_comes_back_knowing_it() -> None:
    """Whatever the policy: the number that it sees when the request is pushed again is what is there."""
    seen: list[tuple[int, int]] = []

    class Sees(Fcfs):
        def push(self, view: RequestView) -> None:
            seen.append((view.request_id, view.num_cached_prompt_tokens))
            super().push(view)

    harness = harness_of(Sees(), num_blocks=40)
    for number in range(2):
        harness.add(fake_request(number, [*range(12), 50 + number], max_tokens=2))
    harness.drain()
    assert seen == [(0, 0), (1, 0), (1, 12)]


def test_what_the_first_admission_saved_is_kept_for_usage() -> None:
    """A preempted request's number is for the client; looking it up again would change what it is told."""
    policy = longest_prefix()
    harness = harness_of(policy, num_blocks=8, max_model_len=32, max_num_batched_tokens=64)
    for number in range(3):
        harness.add(fake_request(number, [number] * 7, max_tokens=12))
    harness.drain()
    assert any(request.num_preemptions for request in harness.requests.values())
    assert [harness.ended[number].num_cached_tokens for number in range(3)] == [0, 0, 0]


def test_a_hint_of_one_that_does_not_wait_is_refused() -> None:
    class AsksAboutThoseThatRun(Fcfs):
        asked: Sequence[RequestView] = ()

        def hints_wanted(self) -> Sequence[RequestView]:
            return self.asked

    policy = AsksAboutThoseThatRun()
    harness = harness_of(policy)
    harness.add(fake_request(0, max_tokens=5))
    harness.step()
    policy.asked = [harness.requests[0]]
    with pytest.raises(PlanError, match="hint of request 0, which does not wait"):
        harness.schedule()


# shortest_first


def test_lengths_are_learnt_by_user_and_prompt_length() -> None:
    predictor = LengthPredictor(memory=50)
    assert predictor.predict("alice", 10, 700) == 700.0
    for _ in range(40):
        predictor.learn("alice", 10, 20)
        predictor.learn("bob", 10, 400)
        predictor.learn("bob", 1000, 100)
    assert predictor.predict("alice", 12, 700) < 40  # 10 and 12 lie between the same powers of two
    assert predictor.predict("bob", 10, 700) > 350
    assert predictor.predict("bob", 10, 30) == 30.0
    assert 50 < predictor.predict("bob", 600, 700) < 150
    assert 100 < predictor.predict("carol", 10, 700) < 250, "what all did"


def test_lengths_that_changed_are_learnt_anew() -> None:
    predictor = LengthPredictor(memory=10)
    for _ in range(1000):
        predictor.learn("", 10, 500)
    for _ in range(50):
        predictor.learn("", 10, 50)
    assert predictor.predict("", 10, 1000) < 60


def test_users_made_up_by_clients_do_not_fill_memory() -> None:
    predictor = LengthPredictor(memory=10)
    for number in range(2 * MAX_GROUPS):
        predictor.learn(f"user {number}", 10, 5)
        predictor.learn("regular", 10, 300)
    assert len(predictor._groups) == MAX_GROUPS
    assert predictor.predict("regular", 10, 1000) > 200


def test_shortest_first_follows_what_it_has_learnt() -> None:
    """Terse and verbose users who ask for the same: the order turns once the first answers are known, for those too that
    waited before."""
    policy = ShortestFirst(ShortestFirstOptions(tokens_per_second=0.001))
    for number in range(6):
        policy.push(waiting_request(number, max_tokens=900, user="verbose" if number < 3 else "terse"))
    assert policy.peek() is not None and policy.peek().request_id == 0  # type: ignore[union-attr]
    for number, (user, length) in enumerate([("verbose", 800), ("terse", 5)] * 3, 10):
        ended = waiting_request(number, user=user)
        ended.output_token_ids = [1] * length
        policy.on_finish(ended)
    list(policy.shed())
    assert [policy.pop().request_id for _ in range(6)] == [3, 4, 5, 0, 1, 2]


def test_what_is_cached_is_no_work() -> None:
    policy = ShortestFirst(ShortestFirstOptions())
    request = waiting_request(0, length=100, max_tokens=10)
    assert policy.work(request) == pytest.approx(30.0)
    request.num_cached_prompt_tokens = 80
    assert policy.work(request) == pytest.approx(14.0)
    request.max_tokens = 0
    assert policy.work(request) == pytest.approx(4.0)


def test_shortest_first_lowers_the_mean_wait() -> None:
    turns = {}
    for policy in (Fcfs(), ShortestFirst(ShortestFirstOptions(tokens_per_second=0.01))):
        harness = harness_of(policy, max_num_seqs=1, num_blocks=40)
        for number in range(8):
            harness.add(fake_request(number, [number] * 3, max_tokens=30 if number % 2 == 0 else 2))
        ends: dict[int, int] = {}
        while len(harness.ended) < 8:
            harness.step()
            ends |= dict.fromkeys(set(harness.ended) - set(ends), len(harness.plans))
        turns[type(policy)] = sum(ends.values())
    assert turns[ShortestFirst] < 0.7 * turns[Fcfs]


# mlfq


def test_a_request_joins_the_level_that_covers_its_prefill_and_sinks() -> None:
    policy = mlfq(quantum=4.0, levels=4, prompt_weight=0.5)
    requests = [waiting_request(number, length) for number, length in enumerate((1, 8, 9, 16, 17, 1000))]
    for request in requests:
        policy.push(request)
    assert [policy.level(request) for request in requests] == [0, 0, 1, 1, 2, 3]
    first = policy.pop()
    policy.on_scheduled(first, 1)
    levels = []
    for _ in range(30):
        policy.on_scheduled(first, 1)
        levels.append(policy.level(first))
    assert levels == [0] * 3 + [1] * 8 + [2] * 16 + [3] * 3
    policy.on_finish(first)
    assert len(policy._services) == 5


def test_a_preempted_request_waits_on_the_level_that_it_sank_to() -> None:
    policy = mlfq(quantum=4.0, prompt_weight=0.0)
    old = waiting_request(0)
    policy.push(old)
    policy.pop()
    for _ in range(13):
        policy.on_scheduled(old, 1)
    policy.push(waiting_request(1))
    old.num_preemptions = 1
    policy.push(old)
    assert policy.level(old) == 2
    assert [policy.pop().request_id for _ in range(2)] == [1, 0]


def test_whoever_waited_too_long_starts_again_on_the_first_level() -> None:
    clock = ManualClock()
    policy = Mlfq(MlfqOptions(quantum=4.0, prompt_weight=1.0, promote_after_seconds=5.0), clock.now)
    long = waiting_request(0, 500)
    policy.push(long)
    clock.advance(5.0)
    policy.push(waiting_request(1, 2, arrival_time=5.0))
    assert policy.pop() is long and policy.level(long) == 0


def gives_way(num_blocks: int = 60, **settings: Any) -> SchedulingHarness:
    """A long prompt runs, 16 tokens a step; a short one arrives after its first step."""
    harness = harness_of(mlfq(quantum=8.0, prompt_weight=1.0), num_blocks=num_blocks, max_steps_in_flight=1, **settings)
    harness.add(fake_request(0, range(60), max_tokens=2))
    harness.step()
    harness.add(fake_request(1, [7] * 6, max_tokens=2))
    return harness


def test_a_long_prompt_gives_way_to_a_short_one() -> None:
    harness = gives_way(max_model_len=100)
    harness.step()
    rows = [(row.request_id, row.num_tokens) for row in harness.plans[1].scheduled]
    assert rows == [(0, 10), (1, 6)]
    harness.drain()
    assert list(harness.ended) == [1, 0]


def test_nobody_gives_way_to_one_that_does_not_fit() -> None:
    """The first step with room shows that the short one does not get in; the next ones are filled again."""
    harness = gives_way(num_blocks=16, max_model_len=64)
    for _ in range(2):
        harness.step()
    rows = [[(row.request_id, row.num_tokens) for row in plan.scheduled] for plan in harness.plans[1:]]
    assert rows == [[(0, 10)], [(0, 16)]]
    harness.drain()


def test_nobody_gives_way_without_a_seat_or_to_an_equal() -> None:
    policy = mlfq(quantum=8.0, prompt_weight=1.0)
    running, short, long = waiting_request(0, 60), waiting_request(1, 4), waiting_request(2, 60)
    policy.push(running)
    policy.pop()
    policy.on_scheduled(running, 16)
    running.num_scheduled_tokens = 16
    policy.push(long)
    assert policy.share(running, Budget(100, 3)) == 100
    policy.push(short)
    assert policy.share(running, Budget(100, 0)) == 100
    assert policy.share(running, Budget(100, 3)) == 96
    assert policy.share(running, Budget(6, 3)) == 3
    assert policy.share(running, Budget(1, 3)) == 1
    assert policy.share(short, Budget(100, 3)) == 100
    running.num_scheduled_tokens = 60
    assert policy.share(running, Budget(100, 3)) == 100


# All of them.


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        (LongestPrefixOptions, {"max_wait_seconds": 0.0}),
        (LongestPrefixOptions, {"lookups_per_step": 32}),
        (LongestPrefixOptions, {"max_wait": 3.0}),
        (ShortestFirstOptions, {"tokens_per_second": -1.0}),
        (ShortestFirstOptions, {"memory": 0}),
        (MlfqOptions, {"levels": 0}),
        (MlfqOptions, {"quantum": float("inf")}),
        (MlfqOptions, {"promote_after": 3.0}),
    ],
)
def test_wrong_options_are_refused(model: type[BaseModel], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model(**wrong)


@pytest.mark.parametrize(
    "name", ["longest_prefix", "shortest_first", "mlfq", "queued", "keyed_queue", "length_predictor"]
)
def test_they_use_the_door_that_third_parties_use(name: str) -> None:
    module = importlib.import_module(f"hotswap.plugins.schedulers.policies.{name}")
    origins = {getattr(value, "__module__", "") or "" for value in vars(module).values()}
    assert all(origin.startswith("hotswap.core.contracts") for origin in origins if origin.startswith("hotswap.core"))
