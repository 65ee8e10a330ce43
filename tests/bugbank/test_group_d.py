"""Bug bank, group D: the prefix cache."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from hotswap import SamplingParams
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.core.testing.oracle import greedy_differences
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.victims.newest import Newest

BLOCK = 4


def prompt_ids(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, 320) for _ in range(count)]


def cached_by_rule(size: int) -> int:
    """Whole blocks of the prompt, the last token never counted: its logits are wanted."""
    return (size - 1) // BLOCK * BLOCK


def harness_of(**settings: Any) -> SchedulingHarness:
    policy = Fcfs()
    return SchedulingHarness(lambda mechanism: ContinuousBatching(mechanism, policy, Newest()), policy, **settings)


def body_of(path: str, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}


# D01


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_d01_a_prompt_of_whole_blocks_computes_its_last_token_again(
    make_tiny: Callable[..., Any], run: Callable[..., Any], oracle: Any, async_scheduling: bool
) -> None:
    """Sizes around multiples of the block, each twice and twice at once: the oracle's tokens; cached tokens by the rule."""
    llm = make_tiny(async_scheduling=async_scheduling, num_gpu_blocks_override=200)
    for size in (1, 3, 4, 5, 7, 8, 9, 16, 17) if async_scheduling else (4, 8, 9, 12, 13):
        ids = prompt_ids(size, seed=size)
        outputs = [run(llm, [ids], max_tokens=6, ignore_eos=True)[0] for _ in range(2)]
        outputs += run(llm, [ids, ids], max_tokens=6, ignore_eos=True)
        first = outputs[0].outputs[0].token_ids
        assert not greedy_differences(oracle, ids, first, banned=(1, 3))
        assert [output.outputs[0].token_ids for output in outputs] == [first] * 4
        assert [output.num_cached_tokens for output in outputs] == [0, *[cached_by_rule(size)] * 3]
    fresh = prompt_ids(8, seed=99)
    assert [o.outputs[0].token_ids for o in run(llm, [fresh] * 4, max_tokens=5)] == [
        run(llm, [fresh], max_tokens=5)[0].outputs[0].token_ids
    ] * 4


# D03


def test_d03_a_match_is_made_again_at_admission() -> None:
    """A request waits for room; the blocks that it matched when it arrived are evicted and filled by the request before
    it. It computes what is gone (the executor checks every block's content), and reports what it really found."""
    harness = harness_of(num_blocks=8, max_model_len=32)
    prompt = range(1, 13)
    harness.add(fake_request(0, prompt, max_tokens=1))
    harness.drain()
    harness.add(fake_request(1, range(100, 120), max_tokens=12))
    harness.step()
    waits = fake_request(2, prompt, max_tokens=4)
    harness.add(waits)
    assert waits.num_cached_prompt_tokens == 8  # a hint, as of its arrival
    harness.drain()
    assert harness.ended[2].token_ids == harness.expected_tokens(2)
    assert harness.ended[2].num_cached_tokens == 0


def test_d03_random_queues_over_a_small_pool(
    make_tiny: Callable[..., Any], plain_tiny: Any, run: Callable[..., Any]
) -> None:
    """Prompts out of a few shared beginnings, more of them than fit, in random order: the tokens without a cache."""
    llm = make_tiny(num_gpu_blocks_override=14, max_num_seqs=4)
    source = random.Random(3)
    stems = [prompt_ids(16, seed) for seed in range(3)]
    prompts = [source.choice(stems)[: source.randrange(1, 17)] + prompt_ids(source.randrange(4), n) for n in range(48)]
    prompts = [ids or [5] for ids in prompts]
    expected = [output.outputs[0].token_ids for output in run(plain_tiny, prompts, max_tokens=12, ignore_eos=True)]
    order = list(range(len(prompts)))
    for _ in range(2):
        source.shuffle(order)
        outputs = run(llm, [prompts[i] for i in order], max_tokens=12, ignore_eos=True)
        assert [output.outputs[0].token_ids for output in outputs] == [expected[i] for i in order]
    stats = llm.stats
    assert stats.prefix_hits > 0 and stats.num_preemptions_recompute > 0


# D04


def test_d04_prompt_logprobs_are_whole_whatever_is_cached(
    make_tiny: Callable[..., Any], plain_tiny: Any, run: Callable[..., Any]
) -> None:
    """One 20-token prompt with and without prompt_logprobs in every order, one at a time and together, n = 1 and 2: all
    positions, equal to those without a cache; such a request neither asks the cache nor counts as a hit."""
    ids = prompt_ids(20)
    fields = {"prompt_logprobs": 2, "max_tokens": 3}
    (truth,) = run(plain_tiny, [ids], **fields)
    llm = make_tiny(num_gpu_blocks_override=100)
    for _ in range(3):
        before = (llm.stats.prefix_queries, llm.stats.prefix_hits)
        (output,) = run(llm, [ids], **fields)
        assert (llm.stats.prefix_queries, llm.stats.prefix_hits) == before
        assert output.num_cached_tokens == 0
        same_scores(output.prompt_logprobs, truth.prompt_logprobs, 20)
        (plain,) = run(llm, [ids], max_tokens=3)
        assert plain.num_cached_tokens == 16 and plain.prompt_logprobs is None
        assert plain.outputs[0].token_ids == truth.outputs[0].token_ids
    for order in itertools.permutations((None, 2, 0)):
        for n in (1, 2):
            params = [SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=count, n=n) for count in order]
            for count, output in zip(order, run(llm, [ids] * 3, params), strict=True):
                assert len(output.outputs) == n
                if count is None:
                    assert output.prompt_logprobs is None
                else:
                    same_scores(output.prompt_logprobs, truth.prompt_logprobs, 20, count)


def same_scores(found: Any, expected: Any, size: int, count: int = 2) -> None:
    assert len(found) == len(expected) == size and found[0] is None
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert next(iter(one)) == next(iter(other))
        assert len(one) in (count, count + 1)
        for token_id, entry in one.items():
            assert entry.rank == other[token_id].rank
            assert entry.logprob == pytest.approx(other[token_id].logprob, abs=1e-5)


def test_d04_echo_over_http(served: Any) -> None:
    """Scores of the same prompt three times, other answers in between."""
    body = {"prompt": "P-d04-0123456789", "echo": True, "logprobs": 1, "max_tokens": 0}
    first = served.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    for _ in range(2):
        assert served.complete("P-d04-0123456789", max_tokens=1).status_code == 200
        assert served.post("/v1/completions", body).json()["choices"][0]["logprobs"] == first


@pytest.mark.parametrize("logprobs", [0, 2])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_d04_scores_come_first_though_another_choice_is_faster(
    make_api: Callable[..., Any], sse: Callable[[Any], list[dict[str, Any]]], logprobs: int, max_tokens: int
) -> None:
    """Only choice 0 computes the prompt's scores, and a choice whose prompt is cached can get ahead of it: its first
    chunk has the prompt and its scores all the same, streamed and whole."""

    class Late(FakeEngine):
        async def _run(self, request: Any, number: int, *rest: Any) -> None:
            if number == 0:
                await asyncio.sleep(0.02)
            await super()._run(request, number, *rest)

    body = {"prompt": ["abcde", "xyz"], "n": 3, "echo": True, "logprobs": logprobs, "max_tokens": max_tokens}
    whole = make_api(Late()).post("/v1/completions", body).json()
    events = sse(make_api(Late()).post("/v1/completions", {**body, "stream": True}))
    for expected in whole["choices"]:
        chunks = [c for event in events for c in event["choices"] if c["index"] == expected["index"]]
        assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
        for name, values in expected["logprobs"].items():
            assert list(itertools.chain(*(chunk["logprobs"][name] for chunk in chunks))) == values
        assert chunks[-1]["finish_reason"] == expected["finish_reason"] == "length"


# D05


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_d05_tenants_with_their_own_salt_share_nothing(
    served: Any, sse: Callable[[Any], list[dict[str, Any]]], path: str, stream: bool, n: int
) -> None:
    """Salts a, b, a, none, none: cached tokens 0, 0, 12, 0, 12. Both generating routes; /v1/embeddings does not exist in
    this version and joins with its issue."""
    text = f"{'chat' in path:d}{stream:d}{n}d05 abcdefg"
    ids = served.post("/tokenize", {"prompt": text}).json()["tokens"]
    body = {**body_of(path, text), "n": n, "stream": stream, "max_tokens": 4}
    if stream:
        body["stream_options"] = {"include_usage": True}
    found = []
    for salt in ("a", "b", "a", None, None, "b", "A"):
        reply = served.post(path, {**body, **({"cache_salt": salt} if salt else {})})
        usage = (sse(reply)[-1] if stream else reply.json())["usage"]
        assert usage["prompt_tokens"] == len(ids)
        found.append(usage["prompt_tokens_details"]["cached_tokens"])
    whole = cached_by_rule(len(ids))
    assert found == [0, 0, whole, 0, whole, whole, 0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_d05_bad_salts_are_refused(make_api: Callable[..., Any], path: str) -> None:
    api = make_api()
    body = body_of(path, "x")
    wrong: list[Any] = ["", "x" * 257, "a b", "é", "\x00", "a\n", 5, True, ["a"], {"a": 1}]
    for salt in wrong:
        reply = api.post(path, {**body, "cache_salt": salt})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "cache_salt", salt
    for good in ("x" * 256, "a.b_c~d+e/f=g:h-i", None):
        assert api.post(path, {**body, "cache_salt": good}).status_code == 200


def test_d05_after_preemption(
    make_tiny: Callable[..., Any], plain_tiny: Any, drive: Callable[..., Any], preempting: Callable[[int], str]
) -> None:
    """Tenants of one prompt, every one but the first preempted once: each comes back to its own blocks only, and all say
    what they say alone. The salt of a choice is its request's."""
    ids = prompt_ids(12)
    alone = drive(plain_tiny)
    (one,) = alone.add(ids, max_tokens=10, ignore_eos=True)
    alone.drain()
    llm = make_tiny(plugins=[preempting(15)], num_gpu_blocks_override=100)
    driver = drive(llm)
    (first,) = driver.add(ids, max_tokens=40, ignore_eos=True, cache_salt="hog")
    salted = [driver.add(ids, max_tokens=10, ignore_eos=True, cache_salt=salt, n=2) for salt in ("a", "b")]
    for _ in range(200):
        driver.step()
        requests = list(driver.core.mechanism._state.requests.values())
        for left, right in itertools.combinations(requests, 2):
            if left.cache_salt != right.cache_salt:
                assert not set(left.block_ids) & set(right.block_ids)
    driver.drain()
    assert llm.stats.num_preemptions_recompute == 4
    for request_id in itertools.chain(*salted):
        assert driver.tokens[request_id] == alone.tokens[one]
    assert driver.tokens[first][:10] == alone.tokens[one]


# D06


def test_d06_a_new_adapter_under_an_old_name_reuses_nothing() -> None:
    """Adapters come with their own issue; their place in the block key is tested here: identity and version, not a
    number. X, then Y under the same label, then X again, the base model in between."""
    harness = harness_of(num_blocks=40)
    prompt = range(1, 14)
    keys = ["X@1", "Y@1", "X@1", "X@2", "", "", "X@2", "Y@1", "1", "01"]
    for number, key in enumerate(keys):
        harness.add(fake_request(number, prompt, max_tokens=2, adapter_key=key))
        harness.drain()
    hits = [harness.ended[number].num_cached_tokens for number in range(len(keys))]
    assert hits == [0, 0, 12, 0, 0, 12, 12, 12, 0, 0]


def test_d06_adapter_and_salt_are_not_confused() -> None:
    """No pair of (adapter, salt) makes the key of another."""
    harness = harness_of(num_blocks=60)
    pairs = [("a", "b"), ("ab", None), ("", "ab"), ("a", None), ("", "a"), ("b", "a"), ("", None), ("a", "")]
    for number, (key, salt) in enumerate(pairs):
        harness.add(fake_request(number, range(9), max_tokens=1, adapter_key=key, cache_salt=salt))
        harness.drain()
    assert [harness.ended[number].num_cached_tokens for number in range(len(pairs))] == [0] * len(pairs)


# D07


def test_d07_prompts_that_are_prefixes_of_each_other(
    make_tiny: Callable[..., Any], plain_tiny: Any, run: Callable[..., Any]
) -> None:
    """Every ordered pair of lengths block - 1 .. 2 * block + 1, one after the other and together; and pairs that part
    within a block. Text = cache off. Without speculation, which is another issue's."""
    plain = plain_tiny
    llm = make_tiny(num_gpu_blocks_override=120)
    lengths = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1)
    stem = prompt_ids(2 * BLOCK + 1, seed=7)
    expected = {size: run(plain, [stem[:size]], max_tokens=6)[0].outputs[0].token_ids for size in lengths}
    for first, second in itertools.product(lengths, lengths):
        llm.reset_prefix_cache()
        for size, hits in ((first, 0), (second, cached_by_rule(min(second, first + 5)))):
            (output,) = run(llm, [stem[:size]], max_tokens=6)
            assert output.outputs[0].token_ids == expected[size], (first, second)
            assert output.num_cached_tokens <= hits
        outputs = run(llm, [stem[:first], stem[:second]], max_tokens=6)
        assert [o.outputs[0].token_ids for o in outputs] == [expected[first], expected[second]]
    for at in range(1, 2 * BLOCK + 1):
        other = [*stem[:at], (stem[at] + 1) % 300 + 4, *stem[at + 1 :]]
        (truth,) = run(plain, [other], max_tokens=6)
        (output,) = run(llm, [other], max_tokens=6)
        assert output.outputs[0].token_ids == truth.outputs[0].token_ids
        assert output.num_cached_tokens == at // BLOCK * BLOCK
