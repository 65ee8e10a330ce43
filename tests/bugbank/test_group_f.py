"""Bug bank, group F: chunked prefill and mixed batches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotswap import SamplingParams

SHARING = Path(__file__).with_name("sharing_policy.py")
SYNC = pytest.mark.parametrize("async_scheduling", [True, False])


def prompt_ids(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, 320) for _ in range(count)]


def same_scores(found: Any, expected: Any) -> None:
    assert (found is None) == (expected is None)
    for one, other in zip(found or [], expected or [], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert list(one) == list(other)
            assert [e.logprob for e in one.values()] == pytest.approx([e.logprob for e in other.values()], abs=1e-5)
            assert [e.rank for e in one.values()] == [e.rank for e in other.values()]


# F01


@pytest.mark.parametrize(
    "budget, share, async_scheduling",
    [(7, None, True), (8, None, False), (10, 3, True), (64, None, False), (64, 2, True), (16, 4, False)],
)
def test_f01_each_request_of_a_mixed_batch_gets_its_own_logprobs(
    make_tiny: Callable[..., Any], plain_tiny: Any, budget: int, share: int | None, async_scheduling: bool
) -> None:
    """Four requests, logprobs {none, 2, none, 0} and prompt logprobs {none, 1, 0, none} in every order, one prompt of one
    token, chunk boundaries inside the others: each as alone. With a share of few tokens a step, an older prompt is still in
    its chunks while newer requests draw: rows that draw and rows that do not alternate."""
    prompts = [prompt_ids(5, 1), prompt_ids(13, 2), prompt_ids(1, 3), prompt_ids(9, 4)]
    counts = [(None, None), (2, 1), (None, 0), (0, None)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=a, prompt_logprobs=b) for a, b in counts
    ]
    truth = {
        (i, j): plain_tiny.generate([prompts[i]], params[j], use_tqdm=False)[0]
        for i, j in itertools.product(range(4), range(4))
    }
    llm = make_tiny(
        max_num_batched_tokens=budget,
        num_gpu_blocks_override=100,
        async_scheduling=async_scheduling,
        enable_prefix_caching=False,
        plugins=[] if share is None else [f"{SHARING},tokens={share}"],
    )
    source = random.Random(budget)
    for order in itertools.permutations(range(4)):
        ways = source.sample(range(4), 4)
        outputs = llm.generate([prompts[i] for i in order], [params[j] for j in ways], use_tqdm=False)
        for i, j, output in zip(order, ways, outputs, strict=True):
            expected = truth[i, j]
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            same_scores(output.outputs[0].logprobs, expected.outputs[0].logprobs)
            same_scores(output.prompt_logprobs, expected.prompt_logprobs)


# F02


@pytest.mark.parametrize(
    "abort_at, async_scheduling",
    [(None, True), (None, False), (0, True), (1, False), (2, True), (2, False), (3, True), (4, False)],
)
def test_f02_no_token_before_the_prompt_ends(
    make_tiny: Callable[..., Any],
    plain_tiny: Any,
    drive: Callable[..., Any],
    abort_at: int | None,
    async_scheduling: bool,
) -> None:
    """Steps of 8 tokens; prompts of 3, 20 and 7 at once with logprobs; the long one aborted in the middle of its chunks at
    every step. Tokens and scores of the others as without chunks; nothing for a prompt that is not computed."""
    prompts = [prompt_ids(3, 1), prompt_ids(20, 2), prompt_ids(7, 3)]
    whole = drive(plain_tiny)
    fields = {"max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    alone = []
    for ids in prompts:
        alone += whole.add(ids, **fields)
        whole.drain()
    driver = drive(make_tiny(num_gpu_blocks_override=100, async_scheduling=async_scheduling))
    ours = [i for ids in prompts for i in driver.add(ids, **fields)]
    requests = dict(driver.core.mechanism._state.requests)
    for turn in itertools.count():
        if not driver.core.has_work():
            break
        if turn == abort_at:
            driver.abort(ours[1])
        for update in driver.step():
            request = requests[update.request_id]
            if update.new_token_ids:
                assert request.num_computed_tokens >= len(request.prompt_token_ids)
    driver.drain()
    for number, (one, other) in enumerate(zip(ours, alone, strict=True)):
        if number == 1 and abort_at is not None:
            assert driver.ends[one] == ["abort"]
            assert driver.tokens[one] == whole.tokens[other][: len(driver.tokens[one])]
            continue
        assert driver.ends[one] == ["length"] and driver.tokens[one] == whole.tokens[other]
        for position, expected in zip(driver.logprobs[one], whole.logprobs[other], strict=True):
            assert position.token_ids == expected.token_ids and position.ranks == expected.ranks
            assert position.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@SYNC
def test_f02_random_mixtures_over_every_budget(
    make_tiny: Callable[..., Any], plain_tiny: Any, async_scheduling: bool
) -> None:
    """Ten prompts of 1 to 30 tokens, budgets 1 to 33: the same tokens as in one step each."""
    source = random.Random(2)
    prompts = [prompt_ids(source.randrange(1, 31), seed) for seed in range(10)]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0)
    truth = plain_tiny.generate(prompts, params, use_tqdm=False)
    for budget in (1, 3, 9) if async_scheduling else (2, 5, 33):
        llm = make_tiny(
            max_num_batched_tokens=budget,
            num_gpu_blocks_override=100,
            async_scheduling=async_scheduling,
            plugins=[f"{SHARING},tokens=2"] if budget > 8 else [],
        )
        for output, expected in zip(llm.generate(prompts, params, use_tqdm=False), truth, strict=True):
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids, budget
            same_scores(output.outputs[0].logprobs, expected.outputs[0].logprobs)
