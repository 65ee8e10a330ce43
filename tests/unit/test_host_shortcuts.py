"""Shortcuts of the host against the long way: rows planned at once, updates gathered without deltas, keys made late."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hotswap.core.contracts.plan import PositionLogprobs, StepPlan
from hotswap.core.contracts.policy import Budget, RequestView
from hotswap.core.contracts.scheduler import RequestUpdate
from hotswap.core.engine.output_processor import OutputProcessor, merge_delta
from hotswap.core.engine.wire import EngineRequest
from hotswap.core.kv_cache import KVCacheManager
from hotswap.core.outputs import RequestOutput
from hotswap.core.sampling_params import SamplingParams
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.core.testing.tiny_models import save_byte_tokenizer
from hotswap.core.text import Tokenizer, TokenizerSpec
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.victims.newest import Newest


class AskedOneByOne(Fcfs):
    """Limits nobody, but says so itself: the scheduler then asks about every request."""

    def share(self, view: RequestView, budget: Budget) -> int:
        return budget.num_tokens


def plans_of(policy: Fcfs, seed: int, **settings: Any) -> tuple[list[StepPlan], dict[int, list[int]]]:
    """A run with prompts in chunks, preemptions, aborts and ends, two steps in flight."""
    draw = random.Random(seed)
    harness = SchedulingHarness(lambda m: ContinuousBatching(m, policy, Newest()), policy, **settings)
    for number in range(8):
        prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 20))]
        harness.add(fake_request(number, prompt, max_tokens=draw.randrange(1, 20)))
        for _ in range(draw.randrange(3)):
            harness.schedule()
        if draw.random() < 0.5:
            harness.confirm()
        if draw.random() < 0.1:
            harness.abort(number)
    harness.drain()
    return harness.plans, {number: ended.token_ids for number, ended in harness.ended.items()}


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_rows_planned_at_once_are_those_planned_one_by_one(seed: int, chunked: bool) -> None:
    settings = {"num_blocks": 14, "enable_chunked_prefill": chunked, "max_num_batched_tokens": 10 if chunked else 48}
    at_once, tokens = plans_of(Fcfs(), seed, **settings)
    one_by_one, same_tokens = plans_of(AskedOneByOne(), seed, **settings)
    assert at_once == one_by_one
    assert tokens == same_tokens


def test_rows_are_planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = SchedulingHarness(lambda m: ContinuousBatching(m, policy, Newest()), policy := Fcfs())
    for number in range(3):
        harness.add(fake_request(number, [number] * 3, max_tokens=9))
    harness.schedule()
    monkeypatch.setattr(ContinuousBatching, "_share", lambda *given: pytest.fail("nobody is to be asked"))
    plan = harness.schedule()
    assert plan is not None
    assert [row.num_tokens for row in plan.scheduled] == [1, 1, 1]


def updates_of(seed: int, sampling: SamplingParams, request_ids: list[int]) -> list[RequestUpdate]:
    """What an engine may say of these choices, in an order of its own."""
    draw = random.Random(seed)
    updates: list[RequestUpdate] = []
    for request_id in request_ids:
        count = draw.randrange(1, 8)
        for place in range(count):
            update = RequestUpdate(request_id, [draw.randrange(100)] * draw.choice([1, 1, 1, 2]), num_cached_tokens=16)
            if sampling.logprobs is not None:
                update.logprobs = [PositionLogprobs([i], [-0.5], [1]) for i in update.new_token_ids]
            if place == count // 2:
                update.queue_seconds, update.prefill_seconds = 0.25, 0.5
                if sampling.prompt_logprobs is not None and request_id == request_ids[0]:
                    update.prompt_logprobs = [PositionLogprobs([2], [-1.0], [1])]
            if place == count - 1:
                update.finish_reason = draw.choice(["length", "stop", "error"])
                if update.finish_reason == "error":
                    update.new_token_ids, update.error, update.error_status = [], "broke", 503
                    update.logprobs = None
            updates.append(update)
    return sorted(updates, key=lambda update: draw.random() if update.finish_reason is None else 2.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer(TokenizerSpec((folder / "tokenizer.json").read_bytes(), bos_id=0, eos_id=3))


@pytest.mark.parametrize("with_text", [True, False])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 0}, {"prompt_logprobs": 0}, {"detokenize": False}])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_gathered_is_what_the_deltas_come_to(
    seed: int, fields: dict[str, Any], with_text: bool, tokenizer: Tokenizer
) -> None:
    sampling = SamplingParams(**fields)
    requests = [EngineRequest(number, [1, 2], sampling, 0.0) for number in (5, 6, 7)]
    updates = updates_of(seed, sampling, [5, 6, 7])
    slow, fast = (OutputProcessor(tokenizer if with_text else None) for _ in range(2))
    expected = RequestOutput("label", "text", [1, 2], [])
    slow.add("label", "text", requests)
    state = fast.add("label", "text", requests)
    for update in updates:
        routed = slow.apply(update)
        assert routed is not None
        merge_delta(expected, routed[1])
        assert fast.gather(update) is state
        assert state.total == expected
    assert state.total.finished and not len(fast)
    assert fast.gather(updates[0]) is None


def test_a_stop_string_ends_what_is_gathered(tokenizer: Tokenizer) -> None:
    outputs = OutputProcessor(tokenizer)
    state = outputs.add("label", None, [EngineRequest(1, [1, 2], SamplingParams(stop=["cd"]), 0.0)])
    for token_id in tokenizer.encode("abcdef", add_special_tokens=False):
        outputs.gather(RequestUpdate(1, [token_id]))
    (output,) = state.total.outputs
    assert (output.text, len(output.token_ids), output.finish_reason, output.stop_reason) == ("ab", 4, "stop", "cd")
    assert (state.to_abort, len(outputs)) == ([1], 0)


def test_plain_tokens_are_gathered_without_a_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = OutputProcessor(None)
    state = outputs.add("label", None, [EngineRequest(1, [1, 2], SamplingParams(), 0.0)])
    outputs.gather(RequestUpdate(1, [7], queue_seconds=0.1, prefill_seconds=0.1))
    monkeypatch.setattr(outputs, "apply", lambda update: pytest.fail("a delta is made"))
    update = RequestUpdate(1, [8])
    outputs.gather(update)
    assert state.total.outputs[0].token_ids == [7, 8]
    assert update.new_token_ids == [8], "what the engine gave is not kept"


def test_keys_of_what_was_scheduled_are_made_when_somebody_asks_or_later() -> None:
    policy = Fcfs()
    harness = SchedulingHarness(lambda m: ContinuousBatching(m, policy, Newest()), policy)
    first = fake_request(0, range(12), max_tokens=2)
    harness.add(first)
    harness.schedule()
    assert (len(first.block_hashes), first.num_announced_blocks) == (1, 0)
    harness.mechanism.catch_up()
    assert (len(first.block_hashes), first.num_announced_blocks, len(harness.kv.pending)) == (3, 3, 3)
    harness.drain()
    assert not len(harness.kv.pending)
    second = fake_request(1, [*range(8), 40, 41, 42, 43], max_tokens=2)
    third = fake_request(2, [*range(8), 40, 41, 42, 43, 44], max_tokens=2)
    harness.add(second)
    harness.add(third)
    harness.schedule()
    assert (second.num_announced_blocks, harness.kv.pending.num_waiting) == (3, 1), "the third asked"
    harness.drain()
    assert [harness.ended[n].num_cached_tokens for n in range(3)] == [0, 8, 12]


def test_one_that_computes_what_is_indexed_is_waited_for_where_that_ends() -> None:
    kv = KVCacheManager(32, 4)
    indexed, computing, waiting = (fake_request(i, range(n), prompt_logprobs=0) for i, n in enumerate((16, 24, 30)))
    computing.prompt_logprobs_pending = True  # it computes every position
    for request in (indexed, computing):
        kv.open_table(request, kv.match(request), request.num_known_tokens)
        request.num_scheduled_tokens = request.num_known_tokens
        if request is indexed:
            request.num_computed_tokens = 16
            kv.index_computed(request)
    kv.announce(computing)
    assert len(kv.match(waiting)) == 4
    assert kv.awaited(waiting) == (computing.block_hashes[5], 8)
