"""Bug bank, group B: sampling and log-probabilities."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hotswap import SamplingParams
from hotswap.core.errors import RequestError
from hotswap.core.sampling_params import SEED_MAX, SEED_MIN
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.core.testing.scripted_model import Part

FLOOR = -9999.0
FLAT = {"base": 0.0}
ROUTES = ("/v1/completions", "/v1/chat/completions")
TEXT = "The king of the sea"


def post(api: Any, path: str, **fields: Any) -> Any:
    body = {"prompt": "abc"} if "chat" not in path else {"messages": [{"role": "user", "content": "abc"}]}
    return api.post(path, {**body, **fields})


def strict_json(text: str) -> Any:
    """As a parser that knows no NaN and no Infinity reads it."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


# B02


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_b02_seeds_arrive_and_bad_ones_are_refused(make_api: Callable[..., Any], path: str, stream: bool) -> None:
    """0 is a seed like any other; -1 asks for a fresh one; out of range or of another type is 400 on `seed`."""
    api = make_api(FakeEngine())
    for seed in (0, 1, 2, SEED_MAX, SEED_MIN, -2, -3):
        assert post(api, path, seed=seed, stream=stream).status_code == 200
        assert api.engine.requests[-1].sampling.seed == seed
    for fields in ({"seed": -1}, {"seed": None}, {}):
        seen = set()
        for _ in range(3):
            assert post(api, path, stream=stream, **fields).status_code == 200
            seen.add(api.engine.requests[-1].sampling.seed)
        assert len(seen) == 3 and -1 not in seen
    wrong: list[Any] = [2**63, SEED_MIN - 1, 2**64, 10**30, "3", "", 1.5, 3.0, 1e3, True, False, [1], {"a": 1}]
    for seed in wrong:
        reply = post(api, path, seed=seed, stream=stream)
        assert reply.status_code == 400, seed
        assert reply.json()["error"]["param"] == "seed"


def test_b02_seeds_reproduce(make_llm: Callable[..., Any], run: Callable[..., Any]) -> None:
    """Flat logits: 0 and 1 repeat themselves and differ; every other seed too; -1 never repeats."""
    llm = make_llm({"T": [FLAT] * 12})

    def tokens(seed: int | None) -> list[int]:
        (output,) = run(llm, ["T"], temperature=1.0, seed=seed, max_tokens=12)
        ids: list[int] = output.outputs[0].token_ids
        return ids

    seeds = (0, 1, 2, -2, SEED_MAX, SEED_MIN)
    first = {seed: tokens(seed) for seed in seeds}
    assert first == {seed: tokens(seed) for seed in reversed(seeds)}
    assert len({tuple(ids) for ids in first.values()}) == len(seeds)
    assert len({tuple(tokens(seed)) for seed in (-1, -1, None, None)}) == 4
    for bad in (2**63, SEED_MIN - 1, 1.5, "3", True):
        with pytest.raises(RequestError, match="seed"):
            SamplingParams(seed=bad)  # type: ignore[arg-type]


# B03


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_b03_ties_go_to_the_lowest_id(make_llm: Callable[..., Any], run: Callable[..., Any], dtype: str) -> None:
    """Equal maxima, alone and in mixed batches: temperature 0 and top_k=1 take the same token, and the
    greedy rows do not notice the random ones. In half precision, values that round to the same are equal too."""
    near = {"base": 0.0, "80": 5.001, "70": 5.0}
    rows = [{"base": 0.0, "80": 5.0, "70": 5.0}, {"base": 1.0}, near, {"base": -3.0, "319": 0.0, "0": 0.0, "5": -0.0}]
    expected = [70, 0, 80 if dtype == "float32" else 70, 0]
    llm = make_llm({"A": rows, "T": [FLAT] * 6}, model={"dtype": dtype})
    greedy: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.01, "top_k": 1, "top_p": 0.5},
        {"temperature": 5.0, "top_k": 1, "seed": 3},
        {"temperature": 0.0, "top_k": 7, "top_p": 0.3},
        {"temperature": 9e-6},
    ]
    for fields in greedy:
        (output,) = run(llm, ["A"], max_tokens=4, **fields)
        assert output.outputs[0].token_ids == expected, fields
    mixed = [("A", SamplingParams(max_tokens=4, **fields)) for fields in greedy]
    mixed += [("T", SamplingParams(max_tokens=4, temperature=2.0, seed=seed, top_k=k)) for seed, k in ((1, 0), (2, 9))]
    source = random.Random(3)
    alone: list[int] | None = None
    for _ in range(2):
        source.shuffle(mixed)
        outputs = llm.generate([p for p, _ in mixed], [params for _, params in mixed], use_tqdm=False)
        for (prompt, params), output in zip(mixed, outputs, strict=True):
            ids = output.outputs[0].token_ids
            if prompt == "A":
                assert ids == expected
            elif params.seed == 1:
                alone = alone or ids
                assert ids == alone


# B04


@pytest.mark.parametrize("prompt_logprobs", [None, 3])
def test_b04_logprobs_are_the_raw_model_s(
    make_tiny: Callable[..., Any], oracle: Any, prompt_logprobs: int | None
) -> None:
    """Temperature, top_p, top_k, min_p, penalties, bias, bans: the reported values are the log-softmax of the plain
    forward, best five by logit, the drawn token first, whatever decided the draw."""
    llm = make_tiny(max_num_batched_tokens=16)
    settings: list[dict[str, Any]] = [
        {"temperature": t, "top_p": p} for t, p in itertools.product((0.0, 0.5, 2.0), (1.0, 0.1))
    ]
    settings += [{"temperature": 1.0, "top_k": 2}, {"temperature": 1.0, "min_p": 0.3}]
    settings += [{"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 1.0, "repetition_penalty": 1.7}]
    settings += [{"temperature": 1.0, "logit_bias": {70: 50.0, 71: -100.0}}, {"temperature": 0.0, "min_tokens": 5}]
    settings += [{"temperature": 1.0, "bad_words": ["e"], "allowed_token_ids": [68, 69, 72, 80]}]
    params = [
        SamplingParams(max_tokens=5, logprobs=5, seed=9, prompt_logprobs=prompt_logprobs, **fields)
        for fields in settings
    ]
    outputs = llm.generate([TEXT] * len(params), params, use_tqdm=False)
    for fields, output in zip(settings, outputs, strict=True):
        choice = output.outputs[0]
        truth = log_softmax(oracle, [*output.prompt_token_ids, *choice.token_ids])
        places = [truth[len(output.prompt_token_ids) - 1 + n] for n in range(len(choice.token_ids))]
        for token_id, row, position in zip(choice.token_ids, places, choice.logprobs, strict=True):
            check_position(row, token_id, position, 5)
        if prompt_logprobs is not None:
            assert output.prompt_logprobs[0] is None
            later = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            for place, (token_id, position) in enumerate(later):
                check_position(truth[place], token_id, position, prompt_logprobs)
        assert choice.cumulative_logprob == pytest.approx(
            sum(float(row[i]) for i, row in zip(choice.token_ids, places, strict=True)), abs=1e-3
        ), fields


@pytest.mark.parametrize("batch", [False, True])
def test_b04_processed_values_are_another_mode(
    make_llm: Callable[..., Any], run: Callable[..., Any], batch: bool
) -> None:
    """--logprobs-mode processed_logprobs: after bias, penalties, temperature and filters; what these leave out has the
    floor. Three possible tokens with logits 2, 1, 0; greedy rows have no temperature."""
    llm = make_llm(
        {"A": [{"base": "-inf", "80": 2.0, "81": 1.0, "82": 0.0}]}, logprobs_mode="processed_logprobs", max_num_seqs=16
    )
    cases: list[tuple[dict[str, Any], list[float | None]]] = [
        ({"temperature": 1.0}, [2, 1, 0]),
        ({"temperature": 0.5}, [4, 2, 0]),
        ({"temperature": 2.0}, [1, 0.5, 0]),
        ({"temperature": 0.0}, [2, 1, 0]),
        ({"temperature": 1.0, "top_k": 2}, [2, 1, None]),
        ({"temperature": 1.0, "top_p": 0.5}, [2, None, None]),
        ({"temperature": 1.0, "top_p": 0.7}, [2, 1, None]),
        ({"temperature": 0.5, "min_p": 0.1}, [4, 2, None]),
        ({"temperature": 2.0, "min_p": 0.1, "top_k": 2}, [1, 0.5, None]),
        ({"temperature": 1.0, "logit_bias": {82: 3.0}}, [2, 1, 3]),
        ({"temperature": 0.5, "logit_bias": {80: -100.0}}, [None, 2, 0]),
        ({"temperature": 0.0, "logit_bias": {81: 100.0}}, [None, 101, None]),
        ({"temperature": 0.0, "allowed_token_ids": [81, 82]}, [None, 1, 0]),
    ]
    params = [SamplingParams(max_tokens=1, logprobs=3, seed=3, **fields) for fields, _ in cases]
    outputs = run(llm, ["A"] * len(params), params) if batch else [run(llm, ["A"], p)[0] for p in params]
    for (fields, logits), output in zip(cases, outputs, strict=True):
        (position,) = output.outputs[0].logprobs
        total = math.log(sum(math.exp(value) for value in logits if value is not None))
        for token_id, value in zip((80, 81, 82), logits, strict=True):
            expected = FLOOR if value is None else value - total
            if token_id in position or value is not None:
                assert position[token_id].logprob == pytest.approx(expected, abs=1e-4), fields
        assert next(iter(position)) == output.outputs[0].token_ids[0]
        assert next(iter(position.values())).logprob > FLOOR


def log_softmax(oracle: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    scores: torch.Tensor = logits.double().log_softmax(-1)
    return scores


def check_position(row: torch.Tensor, token_id: int, position: dict[int, Any], count: int) -> None:
    assert next(iter(position)) == token_id
    best = row.topk(count).indices.tolist()
    assert set(position) == {token_id, *best}
    for other, entry in position.items():
        assert entry.logprob == pytest.approx(float(row[other]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[other]).sum())


def test_b04_the_sampled_token_is_always_among_them(served: Any) -> None:
    """Both routes, alternatives fewer than the sampled token's rank."""
    for seed in range(5):
        reply = served.complete("T", temperature=2.0, seed=seed, max_tokens=4, logprobs=1).json()["choices"][0]
        for token, top in zip(reply["logprobs"]["tokens"], reply["logprobs"]["top_logprobs"], strict=True):
            assert token in top
        content = served.chat("T", temperature=2.0, seed=seed, max_tokens=4, logprobs=True, top_logprobs=1)
        for entry in content.json()["choices"][0]["logprobs"]["content"]:
            assert entry["logprob"] == pytest.approx(-math.log(320), abs=1e-4) and len(entry["top_logprobs"]) == 1


# B05


@pytest.mark.parametrize("stream", [False, True])
def test_b05_minus_infinity_is_a_number_in_json(served: Any, stream: bool) -> None:
    """Rows with impossible tokens among the five best, on both routes; a list of allowed tokens in place of a grammar
    (grammars are another issue's). 200, strict JSON, -9999.0 as the floor."""
    settings: list[dict[str, Any]] = [
        {"allowed_token_ids": [80, 82]},
        {"top_k": 1},
        {"temperature": 0.01},
        {"temperature": 0.0},
        {"temperature": 2.0, "seed": 1},
        {"logit_bias": {"81": 100}},
        {"temperature": 0.0, "top_p": 0.01, "min_p": 1.0},
    ]
    for fields in settings:
        forms: list[Any] = [
            served.complete("I", max_tokens=2, logprobs=5, stream=stream, **fields),
            served.complete("I", max_tokens=2, logprobs=5, stream=stream, echo=True, **fields),
            served.chat("I", max_tokens=2, logprobs=True, top_logprobs=5, stream=stream, **fields),
        ]
        if not stream:
            forms.append(served.complete("PI"[::-1] + "x", max_tokens=2, logprobs=5, prompt_logprobs=5, **fields))
        for reply in forms:
            assert reply.status_code == 200, reply.text
            parts = (
                [line[6:] for line in reply.text.split("\n\n") if line.startswith("data: {")]
                if stream
                else [reply.text]
            )
            floors = 0
            for part in parts:
                numbers = list(logprob_numbers(strict_json(part)))
                assert all(math.isfinite(number) and FLOOR <= number <= 0 for number in numbers)
                floors += numbers.count(FLOOR)
            assert floors >= 3 or "prompt_logprobs" in reply.text


def logprob_numbers(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        for name, item in value.items():
            inside = key or ("logprobs" if name in ("logprobs", "prompt_logprobs") else "")
            if inside and name in ("text_offset", "bytes", "rank", "finish_reason", "token", "decoded_token"):
                continue
            yield from logprob_numbers(item, inside)
    elif isinstance(value, list):
        for item in value:
            yield from logprob_numbers(item, key)
    elif key and isinstance(value, (int, float)):
        yield value


def test_b05_impossible_prompt_tokens(make_llm: Callable[..., Any], run: Callable[..., Any]) -> None:
    """A prompt token that the model calls impossible has the floor, and so has a forced one."""
    rows = [{"base": "-inf", "80": 0.0}] * 6
    llm = make_llm({"A": Part(rows=rows, prompt_tokens=1)})
    (output,) = run(llm, ["A" + "m" * 4], prompt_logprobs=2, logprobs=2, max_tokens=2)
    first, *rest = output.prompt_logprobs
    assert first is None
    for token_id, position in zip(output.prompt_token_ids[1:], rest, strict=True):
        assert position[token_id].logprob == (0.0 if token_id == 80 else FLOOR)
        assert all(math.isfinite(entry.logprob) for entry in position.values())


# B07

BAD_KEYS = [
    "-1",
    "320",
    "1e3",
    "abc",
    "",
    " 5",
    "5 ",
    "0x5",
    "5.0",
    "+5",
    "٣",
    "99999999999999999999",
    "2147483648",
    "true",
]
BAD_VALUES = [101, -101, 100.01, -1e9, None, "5", True, [1], {"a": 1}]


@pytest.mark.parametrize("path", ROUTES)
def test_b07_bad_biases_are_refused_naming_the_field(make_api: Callable[..., Any], path: str) -> None:
    api = make_api(FakeEngine())
    for key in BAD_KEYS:
        reply = post(api, path, logit_bias={"5": 1, key: 1})
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("logit_bias"), (key, reply.text)
    for value in BAD_VALUES:
        reply = post(api, path, logit_bias={"5": value})
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("logit_bias"), (value, reply.text)
    for whole in ([], "5", 5, [{"5": 1}], {str(i): 1 for i in range(1025)}, {"5": 1, "05": 1}):
        reply = post(api, path, logit_bias=whole)
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("logit_bias"), whole
    for good in ({}, None, {"0": 100}, {"319": -100}, {"5": 0.5}):
        assert post(api, path, logit_bias=good).status_code == 200
    assert len(api.engine.requests) == 5


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_b07_other_lists_of_ids_too(make_api: Callable[..., Any], path: str, field: str) -> None:
    api = make_api(FakeEngine())
    for ids in ([-1], [320], [5, 2**31], [2**63], ["5"], [5.0], [True], [None], "5", {"5": 1}, [[5]]):
        reply = post(api, path, **{field: ids})
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith(field), ids
    assert not api.engine.requests
    assert post(api, path, **{field: [319, 0]}).status_code == 200


def test_b07_valid_biases_ban_and_force_and_others_do_not_notice(served: Any) -> None:
    """In one batch on a real server; a refused request in between changes nothing."""
    for _ in range(3):
        assert served.complete("H", logit_bias={"320": 1}).status_code == 400
        assert served.complete("H", temperature=0).json()["choices"][0]["text"] == "hello"
        assert (
            served.complete("H", temperature=0, logit_bias={"80": 100}, max_tokens=3).json()["choices"][0]["text"]
            == "mmm"
        )
        banned = served.complete("H", temperature=0, logit_bias={"75": -100}, max_tokens=1).json()["choices"][0]["text"]
        assert banned != "h"


def test_b07_a_tokenizer_longer_than_the_logits(make_llm: Callable[..., Any], run: Callable[..., Any]) -> None:
    """270 logits, 276 tokens: an id beyond is refused wherever it comes from; a banned word that cannot be drawn bans
    nothing and is no fault."""
    llm = make_llm({"A": "abc"}, model={"vocab_size": 270, "eos_token_ids": [3, 275]})
    assert run(llm, ["A"])[0].outputs[0].text == "abc"
    for fields in ({"logit_bias": {270: 1.0}}, {"stop_token_ids": [275]}, {"allowed_token_ids": [269, 270]}):
        with pytest.raises(RequestError, match=r"outside 0\.\.269") as caught:
            run(llm, ["A"], **fields)
        assert caught.value.param in fields
    with pytest.raises(RequestError, match=r"outside 0\.\.269"):
        run(llm, ["A w"])
    # " w" is token 275, "w" is one of the bytes.
    assert run(llm, ["A"], bad_words=["w"])[0].outputs[0].text == "abc"
    assert run(llm, ["A"], ignore_eos=True, max_tokens=3)[0].outputs[0].text == "abc"


# B08


def chosen(make_llm: Callable[..., Any], run: Callable[..., Any], cases: list[Any]) -> list[int]:
    """The token drawn after the forced ones, of every case (prompt ids, forced tokens, logit of X, logit of Y, params),
    all in one batch. X is 80, Y is 81."""
    parts, prompts, params = {}, [], []
    for number, (tail, forced, x, y, fields) in enumerate(cases):
        key = 100 + number
        parts[key] = Part(rows=[*forced, {"base": -50.0, "80": x, "81": y}], prompt_tokens=1 + len(tail))
        prompts.append([key, *tail])
        params.append(SamplingParams(temperature=0.0, max_tokens=len(forced) + 1, **fields))
    outputs = run(make_llm(parts, max_num_batched_tokens=64, max_num_seqs=64), prompts, params)
    return [output.outputs[0].token_ids[-1] for output in outputs]


def test_b08_frequency_counts_presence_does_not(make_llm: Callable[..., Any], run: Callable[..., Any]) -> None:
    """X three times in the output: its logit loses 3 * frequency + 1 * presence, to within a hundredth; Y nothing."""
    cases: list[Any] = []
    expected = []
    for frequency, presence in itertools.product((0.0, 0.5, 2.0, -1.0), (0.0, 1.5, -2.0)):
        loss = 3 * frequency + presence
        for margin in (0.01, -0.01):
            fields = {"frequency_penalty": frequency, "presence_penalty": presence}
            cases.append(([], [80, 80, 80], loss + margin, 0.0, fields))
            expected.append(80 if margin > 0 else 81)
    assert chosen(make_llm, run, cases) == expected


def test_b08_presence_and_frequency_look_at_the_output_only(
    make_llm: Callable[..., Any], run: Callable[..., Any]
) -> None:
    fields = {"frequency_penalty": 2.0, "presence_penalty": 2.0}
    cases = [([80, 80], [], 0.01, 0.0, fields), ([80, 81], [82], 0.01, 0.0, fields), ([80], [80], 4.01, 0.0, fields)]
    cases += [([80], [80], 3.99, 0.0, fields)]
    assert chosen(make_llm, run, cases) == [80, 80, 80, 81]


def test_b08_repetition_divides_positive_and_multiplies_negative(
    make_llm: Callable[..., Any], run: Callable[..., Any]
) -> None:
    """HF's definition, prompt included, once however often the token came; then the other two penalties."""
    cases: list[Any] = []
    expected = []
    for penalty, x in itertools.product((2.0, 1.25, 0.5), (6.0, -2.0)):
        value = x / penalty if x > 0 else x * penalty
        for tail, forced in (([80], []), ([], [80, 80]), ([80, 80], [80]), ([81, 80], [80])):
            other = 1.0 if 81 not in tail else None
            for margin in (0.01, -0.01):
                y = value + margin
                if other is None:  # Y is in the prompt: what must be given so that it comes out at y
                    y = y * penalty if y > 0 else y / penalty
                cases.append((tail, forced, x, y, {"repetition_penalty": penalty}))
                expected.append(81 if margin > 0 else 80)
    fields = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    cases += [([], [80, 80], 6.0, 6 / 2 - 1.0 - 0.25 + margin, fields) for margin in (0.01, -0.01)]
    expected += [81, 80]
    assert chosen(make_llm, run, cases) == expected


# B09


def test_b09_each_row_of_a_batch_is_as_if_it_were_alone(make_tiny: Callable[..., Any]) -> None:
    """Every feature beside every other in three orders; the noise is the seed's."""
    llm = make_tiny(max_num_seqs=24, num_gpu_blocks_override=400, max_num_batched_tokens=32)
    settings: list[dict[str, Any]] = [
        {"top_k": 1},
        {},
        {"min_p": 0.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.4},
        {"top_k": 5},
        {"top_p": 0.3},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0},
        {"temperature": 0.3, "logit_bias": {80: 5.0}},
        {"bad_words": ["e"]},
        {"allowed_token_ids": list(range(60, 100))},
        {"min_tokens": 6},
        {"ignore_eos": True},
        {"logprobs": 2},
    ]
    params = [
        SamplingParams(**{"temperature": 0.9, "seed": n, "max_tokens": 6, **fields})
        for n, fields in enumerate(settings)
    ]
    alone = [llm.generate(TEXT, p, use_tqdm=False)[0].outputs[0].token_ids for p in params]
    source = random.Random(9)
    order = list(range(len(params)))
    for _ in range(3):
        source.shuffle(order)
        outputs = llm.generate([TEXT] * len(order), [params[i] for i in order], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [alone[i] for i in order]


def test_b09_top_k_off_and_beyond_the_vocabulary(make_llm: Callable[..., Any], run: Callable[..., Any]) -> None:
    llm = make_llm({"T": [FLAT] * 8}, max_num_seqs=16)
    values = (0, -1, 320, 321, 10**6, 2**31 - 1)
    params = [SamplingParams(temperature=1.0, seed=4, top_k=k, max_tokens=8) for k in values]
    (plain,) = run(llm, ["T"], SamplingParams(temperature=1.0, seed=4, max_tokens=8))
    outputs = run(llm, ["T"] * len(values), params)
    assert all(output.outputs[0].token_ids == plain.outputs[0].token_ids for output in outputs)
    for bad in (-2, 2**31):
        with pytest.raises(RequestError, match="top_k"):
            SamplingParams(top_k=bad)


def test_b09_min_p_is_relative_to_the_row_s_best_after_temperature(
    make_llm: Callable[..., Any], run: Callable[..., Any]
) -> None:
    """Two tokens a logit of 1 apart: the second is exp(-1 / T) of the best. 64 seeds a case, all cases in one batch."""
    llm = make_llm({"A": [{"base": "-inf", "80": 7.0, "81": 6.0}]}, max_num_seqs=64, num_gpu_blocks_override=200)
    cases = [(0.5, 0.12), (0.5, 0.15), (1.0, 0.36), (1.0, 0.38), (2.0, 0.6), (2.0, 0.62), (1.0, 0.0), (1.0, 1.0)]
    params = [SamplingParams(temperature=t, min_p=p, seed=seed, max_tokens=1) for t, p in cases for seed in range(64)]
    outputs = run(llm, ["A"] * len(params), params)
    for number, (temperature, min_p) in enumerate(cases):
        drawn = {output.outputs[0].token_ids[0] for output in outputs[number * 64 : number * 64 + 64]}
        assert drawn == ({80, 81} if math.exp(-1 / temperature) > min_p else {80}), (temperature, min_p)


# B10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_b10_tiny_temperatures_do_not_overflow(
    make_llm: Callable[..., Any], run: Callable[..., Any], dtype: str
) -> None:
    """Logits of +-60000: never NaN, the best token; below 1e-5 it is greedy decoding by definition."""
    rows = [
        {"base": -60000.0, "80": 60000.0, "81": 59000.0},
        {"base": 0.0, "80": 60000.0, "81": -60000.0},
        {"base": -60000.0, "80": -59000.0},
        {"base": 59000.0, "80": 60000.0},
    ]
    llm = make_llm({"A": rows}, model={"dtype": dtype}, max_num_seqs=32)
    temperatures = (0.0, 1e-9, 1e-6, 9.9e-6, 1e-5, 1.1e-5, 1e-4, 0.01, 0.1)
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.5}, {"top_k": 40}, {"min_p": 0.1}, {"repetition_penalty": 1.1}]
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=4, logprobs=3, **f) for t in temperatures for f in filters
    ]
    for p, output in zip(params, run(llm, ["A"] * len(params), params), strict=True):
        choice = output.outputs[0]
        assert output.error is None
        if p.repetition_penalty == 1.0:
            assert choice.token_ids == [80] * 4, p
        assert all(math.isfinite(e.logprob) for position in choice.logprobs for e in position.values())


# B11


@pytest.mark.parametrize("path", ROUTES)
def test_b11_valid_values_pass_and_no_type_is_coerced(make_api: Callable[..., Any], path: str) -> None:
    """The rule: a JSON number with a fraction, 5.0 included, is no integer, a string is no number, true is neither."""
    api = make_api(FakeEngine())
    for value in (3.0, 3, 100.0, 0.01, 1e5):
        assert post(api, path, repetition_penalty=value).status_code == 200
        assert api.engine.requests[-1].sampling.repetition_penalty == value
    wrong: list[Any] = [0, 0.0, -1.0, "1.1", True, [1.1], 1e300]
    for value in wrong:
        reply = post(api, path, repetition_penalty=value)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "repetition_penalty", value
    for name in ("top_k", "min_tokens", "max_tokens", "n", "seed", "truncate_prompt_tokens", "priority"):
        for value in list[Any]([5.0, "5", 5.5, True, [5]]):
            reply = post(api, path, **{name: value})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == name, (name, value)
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
        assert post(api, path, **{name: 1}).status_code == 200  # an integer is a number
        for value in list[Any](["1", True, [1.0], {}]):
            reply = post(api, path, **{name: value})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == name, (name, value)
    for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "stream"):
        for value in list[Any]([1, 0, "true", "yes", []]):
            reply = post(api, path, **{name: value})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == name, (name, value)


def test_b11_every_end_token_is_masked_while_ignored(make_llm: Callable[..., Any], run: Callable[..., Any]) -> None:
    """Three ends of sequence, each the best in turn: none is drawn under ignore_eos, nor below min_tokens; then the first
    of them ends it. A stop token is masked below min_tokens only."""
    order = ([3, 1, 2], [1, 2, 3], [2, 3, 1])
    rows = [{"base": 0.0, str(a): 9.0, str(b): 8.0, str(c): 7.0, "80": 6.0, "81": 5.0} for a, b, c in order]
    llm = make_llm({"A": rows * 2}, model={"eos_token_ids": [3, 1, 2]})

    def ask(**fields: Any) -> Any:
        return run(llm, ["A"], **fields)[0].outputs[0]

    assert ask(ignore_eos=True, max_tokens=6).token_ids == [80] * 6
    assert ask(max_tokens=6).token_ids == [3]
    for count, first in ((1, 1), (2, 2), (3, 3)):
        choice = ask(max_tokens=6, min_tokens=count)
        assert choice.token_ids == [80] * count + [first] and choice.finish_reason == "stop"
    choice = ask(max_tokens=6, min_tokens=3, stop_token_ids=[80])
    assert choice.token_ids == [81, 81, 81, 3] and choice.stop_reason is None
    choice = ask(max_tokens=6, ignore_eos=True, stop_token_ids=[80])
    assert choice.token_ids == [80] and choice.stop_reason == 80
    assert ask(max_tokens=2, ignore_eos=True, stop_token_ids=[2]).token_ids == [2]
