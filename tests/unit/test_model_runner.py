"""The worker with a model whose output depends on every token and every block of a request's past, and on nothing
else."""

from __future__ import annotations

import random
import sys
from typing import Any

import hash_worker
import pytest
import torch
from hash_worker import POISON, PROMPT, WIDTH, Driver, Tracked, alone, check, prompt_entries

from hotswap.core.runner.model_runner import ModelRunner
from hotswap.core.runner.prompt_logprobs import SLICE

GRAPHS = False


@pytest.fixture(autouse=True, params=["eager", "graphs"])
def _every_test_with_and_without_graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "GRAPHS", request.param == "graphs")


def make_runner(max_num_seqs: int = 8) -> ModelRunner:
    runner, _ = hash_worker.make_runner(max_num_seqs, graphs=GRAPHS)
    assert (runner.capture_graphs() > 0) == GRAPHS
    return runner


@pytest.mark.parametrize("chunks", [[11], [1] * 11, [4, 4, 3], [3, 7, 1], [5, 5, 1]])
def test_a_prompt_in_any_chunks_gives_the_same_tokens_and_logprobs(chunks: list[int]) -> None:
    driver = Driver(make_runner())
    request = driver.add(1, PROMPT, temperature=0.0, logprobs=2, prompt_logprobs=1)
    for chunk in chunks:
        assert request.outputs == []
        driver.run({1: chunk})
    for _ in range(9):
        driver.run({1: 1})
    assert len(request.outputs) == 10
    check(request)


def test_F02_partial_prefills_in_one_batch_emit_nothing_early_and_one_may_leave() -> None:
    driver = Driver(make_runner())
    a = driver.add(1, PROMPT[:3], temperature=0.0, logprobs=1)
    b = driver.add(2, PROMPT * 2, temperature=0.0, logprobs=1)
    c = driver.add(3, PROMPT[:7], temperature=0.0, logprobs=1)
    driver.run({1: 3, 2: 3, 3: 2})
    driver.run({3: 4, 1: 1, 2: 3})
    assert (len(a.outputs), b.outputs, c.outputs) == (2, [], [])
    driver.leave(2)
    driver.run({3: 1, 1: 1})
    driver.run({1: 1, 3: 1})
    for request in (a, c):
        check(request)
    assert (len(a.outputs), len(c.outputs)) == (4, 2)


def test_F01_mixed_logprobs_go_to_their_own_rows() -> None:
    driver = Driver(make_runner())
    wanted: list[dict[str, Any]] = [{}, {"logprobs": 2}, {}, {"logprobs": 0, "prompt_logprobs": 3}]
    prompts = [PROMPT[:6], PROMPT, PROMPT[2:9], PROMPT[:1]]
    requests = [driver.add(i, p, temperature=0.0, **w) for i, (p, w) in enumerate(zip(prompts, wanted, strict=True))]
    driver.run({0: 6, 1: 5, 2: 7, 3: 1})
    driver.run({1: 6, 0: 1, 3: 1})
    driver.run({3: 1, 2: 1, 1: 1})
    for request in requests:
        check(request)


def test_two_steps_in_flight_feed_on_tokens_that_the_host_has_not_seen() -> None:
    driver = Driver(make_runner())
    requests = [driver.add(i, PROMPT[i:], temperature=0.8, seed=i, logprobs=1) for i in range(3)]
    driver.plan({0: 11, 1: 10, 2: 4})
    driver.plan({0: 1, 1: 1, 2: 5})  # made before the first result is known
    for _ in range(12):
        driver.finish()
        driver.plan(dict.fromkeys(range(3), 1))
    while driver.in_flight:
        driver.finish()
    for request in requests:
        assert len(request.outputs) >= 13
        check(request)


def test_preempted_requests_come_back_with_their_outputs_and_other_blocks() -> None:
    driver = Driver(make_runner())
    common: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.9}
    a = driver.add(1, PROMPT, seed=4, prompt_logprobs=0, **common)
    b = driver.add(2, PROMPT[:5], seed=5, **common)
    driver.run({1: 11, 2: 5})
    driver.run({1: 1, 2: 1})
    driver.leave(1)
    driver.run({2: 1})
    driver.run({1: 6, 2: 1})  # back, its recomputation in chunks
    driver.run({2: 1, 1: 7})
    driver.run({1: 1, 2: 1})
    assert (len(a.outputs), len(b.outputs)) == (4, 6)
    check(a)
    check(b)


def test_requests_that_come_back_in_each_others_slots_keep_their_own_tokens() -> None:
    driver = Driver(make_runner(max_num_seqs=2))
    a = driver.add(1, PROMPT, temperature=1.0, seed=4, presence_penalty=0.5)
    b = driver.add(2, PROMPT[:5], temperature=1.0, seed=5, presence_penalty=0.5)
    driver.run({1: 11, 2: 5})
    driver.leave(1)
    driver.leave(2)
    driver.run({1: 12, 2: 6})  # the seat freed last is taken first
    for _ in range(3):
        driver.run({1: 1, 2: 1})
    check(a)
    check(b)
    assert len(driver.runner._pool) == 2
    driver.leave(1)
    driver.leave(2)
    driver.add(3, PROMPT[:2], temperature=0.0)
    driver.run({3: 2})
    assert len(driver.runner._pool) == 0


def test_E01_preemption_within_a_prompt_neither_loses_nor_repeats_prompt_logprobs() -> None:
    driver = Driver(make_runner())
    request = driver.add(1, PROMPT * 3, temperature=0.0, prompt_logprobs=1)
    for _ in range(3):
        driver.run({1: 8})
    driver.leave(1)
    driver.run({1: 20})
    driver.run({1: 13})
    check(request)


def test_removed_and_new_in_one_plan_share_the_last_seat() -> None:
    driver = Driver(make_runner(max_num_seqs=1))
    driver.add(1, PROMPT, temperature=0.0)
    driver.run({1: 11})
    driver.leave(1)
    request = driver.add(2, PROMPT[:4], temperature=0.0)
    driver.run({2: 4})
    check(request)


def test_scoring_gives_prompt_logprobs_without_drawing() -> None:
    long = [(i * 37 + 5) % WIDTH for i in range(SLICE + 20)]
    long = [token if token != POISON else 14 for token in long]
    driver = Driver(make_runner())
    request = driver.add(1, long, temperature=0.0, prompt_logprobs=2)
    plan = driver.plan({1: len(long)})
    plan.scheduled[0].samples, request.placeholders = False, 0
    result = driver.finish()
    assert result.rows[0].token_ids == []
    assert request.prompt_logprobs == dict(enumerate(prompt_entries(long, 2), start=1))


def test_a_prompt_of_one_token_has_no_prompt_logprobs() -> None:
    driver = Driver(make_runner())
    driver.add(1, [5], temperature=0.0, prompt_logprobs=2)
    assert driver.run({1: 1}).rows[0].prompt_logprobs is None


def test_P3_a_request_of_nan_ends_alone() -> None:
    def outputs(poisoned: bool) -> list[Tracked]:
        driver = Driver(make_runner())
        driver.add(1, PROMPT, temperature=0.7, seed=1, logprobs=2, min_p=0.1)
        driver.add(
            2, [4, POISON if poisoned else 6, 7], temperature=0.9, seed=2, top_p=0.9, logprobs=1, prompt_logprobs=1
        )
        driver.add(3, PROMPT[:4], temperature=0.0, presence_penalty=1.0)
        driver.run({1: 11, 2: 3, 3: 4})
        for _ in range(5):
            if driver.requests[2].error is None:
                driver.run({1: 1, 2: 1, 3: 1})
            else:
                driver.run({1: 1, 3: 1})
        return list(driver.requests.values())

    clean, dirty = outputs(False), outputs(True)
    assert dirty[1].error == "the model's logits are not finite (NaN or infinity)"
    assert (dirty[1].outputs, dirty[1].prompt_logprobs) == ([], {})
    for i in (0, 2):
        assert dirty[i].error is None
        assert (dirty[i].outputs, dirty[i].logprobs) == (clean[i].outputs, clean[i].logprobs)
        check(dirty[i])


def test_a_faulty_request_that_is_still_in_flight_harms_nobody() -> None:
    driver = Driver(make_runner())
    driver.add(1, [POISON], temperature=0.0)
    other = driver.add(2, PROMPT, temperature=0.0)
    driver.plan({1: 1, 2: 11})
    driver.plan({1: 1, 2: 1})
    driver.finish()
    driver.finish()
    assert driver.requests[1].error is not None
    check(other)


def test_block_copies_come_before_the_forward_and_before_later_writes() -> None:
    driver = Driver(make_runner())
    first = driver.add(1, PROMPT[:6], temperature=0.0)
    driver.run({1: 6})
    # Request 2 starts with the same six tokens: it shares block 0 and copies block 1, which it then writes to.
    second = driver.add(2, [*PROMPT[:6], 50, 51], temperature=0.0)
    copied = driver.free.pop()
    second.blocks, second.scheduled = [first.blocks[0], copied], 6
    plan = driver.plan({1: 1, 2: 2})
    plan.block_copies = [(0, first.blocks[1], copied)]
    driver.finish()
    check(first)
    assert second.outputs == alone(second.prompt, second.params, 1)[0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 2])
def test_any_schedule_gives_every_request_what_it_gets_alone(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    driver = Driver(make_runner(max_num_seqs=5))
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.8, "logprobs": 1},
        {"temperature": 1.2, "top_k": 9, "frequency_penalty": 0.6},
        {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.2, "logprobs": 0},
        {"temperature": 0.0, "prompt_logprobs": 1, "eos_token_ids": [5, 6], "min_tokens": 3},
        {"temperature": 1.0, "bad_words_token_ids": [[7], [8, 9]], "logit_bias": {3: 4.0}},
    ]
    for i in range(9):
        prompt = [t if (t := rng.randrange(WIDTH)) != POISON else 14 for _ in range(rng.randint(1, 24))]
        driver.add(i, prompt, seed=i, **rng.choice(choices))
    for _ in range(45):
        flying = {row.request_id for plan in driver.in_flight for row in plan.scheduled}
        resident = [i for i, r in driver.requests.items() if r.resident]
        if resident and rng.random() < 0.15 and (victim := rng.choice(resident)) not in flying:
            driver.leave(victim)
            resident.remove(victim)
        waiting = [i for i in driver.requests if not driver.requests[i].resident]
        rng.shuffle(waiting)
        batch = [i for i in resident if rng.random() < 0.9] + waiting[: max(0, 5 - len(resident))]
        work = {i: rng.randint(1, min(driver.wanted(i), 9)) for i in batch if driver.wanted(i) > 0}
        if work:
            driver.plan(work)
        while driver.in_flight and len(driver.in_flight) >= depth:
            driver.finish()
    while driver.in_flight:
        driver.finish()
    assert sum(len(request.outputs) for request in driver.requests.values()) > 60
    for request in driver.requests.values():
        tokens, entries = alone(request.prompt, request.params, len(request.outputs))
        assert request.outputs == tokens
        assert request.logprobs == (entries if request.params.logprobs is not None else [])
        if request.params.prompt_logprobs is not None and request.outputs:
            assert request.prompt_logprobs == dict(enumerate(prompt_entries(request.prompt, 1), start=1))


def test_masks_reach_the_requests_that_they_are_for() -> None:
    driver = Driver(make_runner())
    driver.add(1, PROMPT, temperature=0.0)
    driver.add(2, PROMPT, temperature=0.0)
    mask = torch.zeros(WIDTH, dtype=torch.bool)
    mask[44] = True
    plan = driver.plan({1: 11, 2: 11})
    driver.runner.execute(plan)
    rows = driver.runner.sample(plan, {2: mask}).rows
    assert rows[1].token_ids == [44] != rows[0].token_ids


def test_steps_out_of_order_are_refused() -> None:
    driver = Driver(make_runner())
    driver.add(1, PROMPT, temperature=0.0)
    first = driver.plan({1: 11})
    with pytest.raises(RuntimeError, match="was not executed last"):
        driver.runner.sample(first, None)
    driver.runner.execute(first)
    with pytest.raises(RuntimeError, match="has not been sampled"):
        driver.runner.execute(driver.plan({1: 1}))


def test_collective_methods() -> None:
    driver = Driver(make_runner(max_num_seqs=1))
    driver.add(1, PROMPT, temperature=0.0, presence_penalty=1.0)
    driver.run({1: 11})
    assert driver.runner.collective("memory") == ["weights     1.000 GiB", "total       1.000 GiB"]
    driver.runner.collective("reset")
    request = driver.add(2, PROMPT[:3], temperature=0.0, presence_penalty=1.0)
    driver.run({2: 3})
    check(request)
    with pytest.raises(ValueError, match="known: memory, reset"):
        driver.runner.collective("fly")
