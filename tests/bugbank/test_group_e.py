"""Bug bank, group E: preemption and recompute."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from hotswap import LLM, SamplingParams
from hotswap.core.errors import RequestError, UsageError
from hotswap.core.testing.oracle import greedy_differences

SYNC = pytest.mark.parametrize("async_scheduling", [True, False])


def prompt_ids(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, 320) for _ in range(count)]


# E01


@pytest.mark.parametrize(
    "after, async_scheduling",
    [(1, True), (8, False), (21, True), (24, True), (24, False), (39, False), (40, True), (43, False)],
)
def test_e01_prompt_logprobs_survive_a_preemption(
    make_tiny: Callable[..., Any], plain_tiny: Any, preempting: Callable[[int], str], after: int, async_scheduling: bool
) -> None:
    """Prompt of 40 in chunks of at most 8, evicted in every kind of place: within the first chunk, on a boundary, before
    and after the prompt's end. One entry a position, equal to the undisturbed run, delivered once."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=1, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, prompt_logprobs=0, n=2),
    ]
    prompts = [prompt_ids(5, 1), prompt_ids(40, 2), prompt_ids(37, 3)]
    truth = plain_tiny.generate(prompts, params, use_tqdm=False)
    disturbed = make_tiny(num_gpu_blocks_override=100, plugins=[preempting(after)], async_scheduling=async_scheduling)
    outputs = disturbed.generate(prompts, params, use_tqdm=False)
    assert disturbed.stats.num_preemptions_recompute == 3
    for output, expected in zip(outputs, truth, strict=True):
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected.outputs]
        assert_scores(output.prompt_logprobs, expected.prompt_logprobs)
        for choice, other in zip(output.outputs, expected.outputs, strict=True):
            assert_scores(choice.logprobs, other.logprobs)


def assert_scores(found: Any, expected: Any) -> None:
    assert (found is None) == (expected is None)
    for one, other in zip(found or [], expected or [], strict=True):
        if other is None:
            assert one is None
            continue
        assert list(one) == list(other)
        assert [e.logprob for e in one.values()] == pytest.approx([e.logprob for e in other.values()], abs=1e-5)


# E03


@pytest.mark.parametrize(
    "blocks, caching, async_scheduling",
    [(12, True, True), (14, False, True), (17, True, False), (12, False, False), (14, True, False), (17, True, True)],
)
def test_e03_choices_share_a_pool_for_two(
    make_tiny: Callable[..., Any],
    plain_tiny: Any,
    drive: Callable[..., Any],
    blocks: int,
    caching: bool,
    async_scheduling: bool,
) -> None:
    """n=3 of 40 tokens each over 12 to 17 blocks of 4: all finish with what they say alone; the audit runs every step."""
    ids = prompt_ids(12)
    fields = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 28, "ignore_eos": True}
    free = drive(plain_tiny)
    alone = free.add(ids, **fields)
    free.drain()
    llm = make_tiny(num_gpu_blocks_override=blocks, enable_prefix_caching=caching, async_scheduling=async_scheduling)
    driver = drive(llm)
    choices = driver.add(ids, **fields)
    while driver.core.has_work():
        driver.step()
        llm.check_integrity()
    driver.drain()
    assert llm.stats.num_preemptions_recompute > 0
    assert [driver.tokens[i] for i in choices] == [free.tokens[i] for i in alone]
    assert [driver.ends[i] for i in choices] == [["length"]] * 3


# E04


@SYNC
def test_e04_the_last_running_request_does_not_fit(
    make_tiny: Callable[..., Any], run: Callable[..., Any], async_scheduling: bool
) -> None:
    """Six blocks of 4. A request that would grow to 40 tokens ends at the 24 that there are; one whose prompt alone is
    too long is refused; two together take turns; whoever comes next is served."""
    llm = make_tiny(num_gpu_blocks_override=6, async_scheduling=async_scheduling)
    for size, limit in itertools.product((1, 4, 20, 23), (None, 40, 36)):
        (output,) = run(llm, [prompt_ids(size)], max_tokens=limit, ignore_eos=True)
        assert output.outputs[0].finish_reason == "length" and output.error is None
        assert len(output.outputs[0].token_ids) == 24 - size
        assert len(run(llm, [[5, 6]], max_tokens=2, ignore_eos=True)[0].outputs[0].token_ids) == 2
    for size in (24, 25, 40):
        with pytest.raises(RequestError) as caught:
            run(llm, [prompt_ids(size)])
        assert caught.value.code == "context_length_exceeded"
    outputs = run(llm, [prompt_ids(4, seed) for seed in range(4)], max_tokens=40, ignore_eos=True)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20] * 4
    outputs = run(llm, [prompt_ids(8)], max_tokens=40, ignore_eos=True, n=3)
    assert [len(choice.token_ids) for choice in outputs[0].outputs] == [16] * 3


# E05


@pytest.mark.parametrize("outputs_before, async_scheduling", [(1, False), (5, True), (5, False), (9, True)])
def test_e05_a_resumed_request_goes_on_where_it_was(
    make_tiny: Callable[..., Any],
    preempting: Callable[[int], str],
    oracle: Any,
    outputs_before: int,
    async_scheduling: bool,
) -> None:
    """Preempted after some outputs, which are then part of what is computed again, in chunks: the oracle's tokens. One
    device; the same over two comes with tensor parallelism, which this version refuses (below)."""
    prompts = [prompt_ids(3, 1), prompt_ids(12, 2), prompt_ids(9, 3)]
    llm = make_tiny(
        num_gpu_blocks_override=100,
        plugins=[preempting(12 + outputs_before)],
        async_scheduling=async_scheduling,
    )
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for ids, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert len(output.outputs[0].token_ids) == 20
        assert not greedy_differences(oracle, ids, output.outputs[0].token_ids, banned=(1, 3))
    assert llm.stats.num_preemptions_recompute == 2


def test_e05_noise_and_penalties_are_resumed_too(
    make_tiny: Callable[..., Any], plain_tiny: Any, preempting: Callable[[int], str]
) -> None:
    """Sampling depends on (seed, position) and on the tokens so far, not on what happened in between."""
    settings: list[dict[str, Any]] = [
        {"max_tokens": 40, "seed": 9},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "frequency_penalty": 1.5, "presence_penalty": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 0.9, "seed": 3, "bad_words": ["e", "th"], "top_p": 0.8},
        {"temperature": 0.0, "min_tokens": 15},
    ]
    params = [SamplingParams(**{"max_tokens": 20, "logprobs": 1, **fields}) for fields in settings]
    prompts = [prompt_ids(8, seed) for seed in range(len(params))]
    truth = plain_tiny.generate(prompts, params, use_tqdm=False)
    disturbed = make_tiny(num_gpu_blocks_override=120, plugins=[preempting(14)])
    for output, expected in zip(disturbed.generate(prompts, params, use_tqdm=False), truth, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert_scores(output.outputs[0].logprobs, expected.outputs[0].logprobs)
    assert disturbed.stats.num_preemptions_recompute > 0


def test_e05_two_devices_are_refused(tiny_llama: Any) -> None:
    with pytest.raises(UsageError, match="tensor"):
        LLM(str(tiny_llama), tensor_parallel_size=2)
