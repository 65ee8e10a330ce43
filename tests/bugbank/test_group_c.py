"""Bug bank, group C: limits, n, best_of."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from hotswap import SamplingParams
from hotswap.core.errors import RequestError
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.core.testing.scripted_model import PLAIN_CHAT_TEMPLATE

ROUTES = ("/v1/completions", "/v1/chat/completions")
Sse = Callable[[Any], list[dict[str, Any]]]


def body_of(path: str, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}


# C01


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_c01_a_prompt_at_the_window_is_refused_and_the_rest_is_the_budget(
    make_api: Callable[..., Any], sse: Sse, path: str, stream: bool
) -> None:
    """Window 64; one character is one token. Refusals come as plain JSON errors, in a stream too."""
    api = make_api(FakeEngine(lambda p, c: [80] * 200, max_model_len=64, chat_template=PLAIN_CHAT_TEMPLATE))
    for size in (1, 62, 63, 64, 65, 200):
        for limit in (None, 0, 1, 64, 2**31 - 1):
            reply = api.post(path, {**body_of(path, "z" * size), "max_tokens": limit, "stream": stream})
            if limit == 0:
                assert reply.status_code == 400 and reply.json()["error"]["param"] == "max_tokens"
                continue
            if size >= 64:
                error = reply.json()["error"]
                assert reply.status_code == 400 and error["code"] == "context_length_exceeded", (size, limit)
                assert error["param"] in ("prompt", "messages") and error["type"] == "invalid_request_error"
                continue
            default = 64 - size if "chat" in path else 16
            budget = min(default if limit is None else limit, 64 - size)
            events = sse(reply) if stream else [reply.json()]
            ends = [c["finish_reason"] for event in events for c in event["choices"]]
            assert ends[-1] == "length"
            assert api.engine.requests[-1].sampling.max_tokens == budget
    for bad in (-1, 2**31, 2**63):
        reply = api.post(path, {**body_of(path, "z"), "max_tokens": bad, "stream": stream})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "max_tokens"


def test_c01_the_engine_itself(make_llm: Callable[..., Any], run: Callable[..., Any]) -> None:
    """The same offline, with the real scheduler: exactly window - prompt tokens come, then "length"."""
    llm = make_llm({"A": [80] * 300}, model={"max_model_len": 64})
    for size in (1, 60, 62, 63):
        for limit in (None, 1, 64):
            (output,) = run(llm, [[36] * size], ignore_eos=True, max_tokens=limit)
            assert len(output.outputs[0].token_ids) == min(64 - size, limit or 64)
            assert output.outputs[0].finish_reason == "length"
    for size in (64, 65, 200):
        with pytest.raises(RequestError) as caught:
            run(llm, [[36] * size])
        assert caught.value.code == "context_length_exceeded" and caught.value.status == 400
    (output,) = run(llm, [[36] * 200], truncate_prompt_tokens=63, max_tokens=9)
    assert len(output.prompt_token_ids) == 63 and len(output.outputs[0].token_ids) == 1


# C02


@pytest.mark.parametrize("path", ROUTES)
def test_c02_the_author_s_limit_is_a_default_and_the_operator_s_a_ceiling(
    make_api: Callable[..., Any], path: str
) -> None:
    def limits(engine: FakeEngine) -> list[int | None]:
        api = make_api(engine)
        for asked in (None, 5, 10, 15):
            assert api.post(path, {**body_of(path, "abc"), "max_tokens": asked}).status_code == 200
        assert api.post(path, {**body_of(path, "abc"), "max_completion_tokens": 15}).status_code == 200
        return [request.sampling.max_tokens for request in engine.requests]

    assert limits(FakeEngine(generation_defaults={"max_tokens": 10})) == [10, 5, 10, 15, 15]
    both = FakeEngine(generation_defaults={"max_tokens": 10}, max_tokens_ceiling=10)
    assert limits(both) == [10, 5, 10, 10, 10]
    reply = make_api(both).post(path, {**body_of(path, "abc"), "min_tokens": 12, "max_tokens": 15})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "min_tokens"
    # A default never forbids what the client asks for.
    author = FakeEngine(generation_defaults={"max_tokens": 10})
    assert make_api(author).post(path, {**body_of(path, "abc"), "min_tokens": 12}).status_code == 200


def test_c02_offline(make_llm: Callable[..., Any], run: Callable[..., Any]) -> None:
    rows = {"A": [80] * 40}
    author = make_llm(rows, model={"generation_config": {"max_new_tokens": 10}})
    assert author.default_sampling_params().max_tokens == 10
    assert len(author.generate("A", use_tqdm=False)[0].outputs[0].token_ids) == 10
    assert len(run(author, ["A"], max_tokens=15)[0].outputs[0].token_ids) == 15
    operator = make_llm(
        rows,
        model={"generation_config": {"max_new_tokens": 20}},
        override_generation_config={"max_new_tokens": 10},
    )
    assert len(operator.generate("A", use_tqdm=False)[0].outputs[0].token_ids) == 10
    assert len(run(operator, ["A"], max_tokens=15)[0].outputs[0].token_ids) == 10
    assert len(run(operator, ["A"], max_tokens=4)[0].outputs[0].token_ids) == 4


# C04


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_c04_max_tokens_0_with_echo_scores_the_prompt(served: Any, sse: Sse, stream: bool, n: int) -> None:
    """Text, token ids, and lists of both, with every count of alternatives: exactly the prompt and its logprobs."""
    text = "P" + "xyz" * 6
    for prompt, count in ((text, 1), ([51, 90, 91], 1), ([text, text[:5]], 2), ([[51, 90], [51, 91, 92]], 2)):
        for logprobs in (None, 0, 1, 5):
            body: dict[str, Any] = {"echo": True, "logprobs": logprobs, "max_tokens": 0, "n": n, "stream": stream}
            if stream:
                body["stream_options"] = {"include_usage": True}
            reply = served.complete(prompt, **body)
            assert reply.status_code == 200, reply.text
            events = sse(reply) if stream else [reply.json()]
            usage = events[-1]["usage"]
            choices = sorted((c for e in events for c in e["choices"]), key=lambda c: int(c["index"]))
            assert len(choices) == n * count and [c["index"] for c in choices] == list(range(n * count))
            assert usage["completion_tokens"] == 0 and usage["total_tokens"] == usage["prompt_tokens"]
            for choice in choices:
                check_scored(choice, prompt, choice["index"] // n if count == 2 else None, logprobs)
    assert served.is_idle()


def check_scored(choice: dict[str, Any], prompt: Any, number: int | None, logprobs: int | None) -> None:
    one = prompt if number is None else prompt[number]
    expected = one if isinstance(one, str) else "".join(chr(i - 4 + 33) for i in one)
    assert choice["text"] == expected or not isinstance(one, str)
    assert choice["finish_reason"] == "length"
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    scores = choice["logprobs"]
    assert len(scores["tokens"]) == len(one) == len(scores["text_offset"])
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][1:] == pytest.approx([-math.log(320)] * (len(one) - 1), abs=1e-4)
    assert all(logprobs <= len(top) <= logprobs + 1 for top in scores["top_logprobs"][1:] if top is not None)
    assert "".join(scores["tokens"]) == choice["text"]
    lengths = [len(token) for token in scores["tokens"]]
    assert scores["text_offset"] == [sum(lengths[:place]) for place in range(len(lengths))]


def test_c04_zero_elsewhere_is_refused_and_null_is_the_default(served: Any) -> None:
    for fields in ({}, {"echo": False}, {"echo": None}, {"logprobs": 1}, {"stream": True}):
        reply = served.complete("L", max_tokens=0, **fields)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "max_tokens", fields
    for fields in ({}, {"echo": True}, {"stream": True}):
        for name in ("max_tokens", "max_completion_tokens"):
            reply = served.chat("L", **{name: 0}, **fields)
            assert reply.status_code == 400 and "max" in reply.json()["error"]["param"], (name, fields)
    assert served.complete("L", max_tokens=None, temperature=0).json()["usage"]["completion_tokens"] == 16
    assert served.chat("H", max_tokens=None, temperature=0).json()["usage"]["completion_tokens"] == 5


def test_c04_offline(make_llm: Callable[..., Any], run: Callable[..., Any]) -> None:
    """max_tokens 0 prefills, in chunks, and draws nothing; with and without the prompt's logprobs."""
    llm = make_llm({"A": [80] * 9})
    for size in (1, 4, 8, 9, 33):
        for wanted in (None, 0, 2):
            (output,) = run(llm, [[36] * size], max_tokens=0, prompt_logprobs=wanted)
            assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
            assert wanted is None or len(output.prompt_logprobs or [None]) == size


# C06


def test_c06_every_choice_obeys_the_same_params(make_llm: Callable[..., Any], run: Callable[..., Any]) -> None:
    """Greedy, so n choices are n times the only one: bad words, min_tokens, an end only generation_config.json knows,
    stops, biases, bans, prompt logprobs."""
    rows = [{"base": 0.0, "80": 9.0, "81": 8.0, "82": 7.0}] * 3 + [{"base": 0.0, "90": 9.0, "83": 8.0}] * 3
    model = {"generation_config": {"eos_token_id": [3, 90]}}
    llm = make_llm({"A": rows}, model=model, max_num_seqs=8)
    settings: list[dict[str, Any]] = [
        {},
        {"bad_words": ["m"]},
        {"bad_words": ["mm"]},
        {"min_tokens": 5},
        {"ignore_eos": True},
        {"bad_words": ["m", "n"], "min_tokens": 4},
        {"stop": ["mm"]},
        {"stop": ["m"], "include_stop_str_in_output": True},
        {"stop_token_ids": [80], "min_tokens": 2},
        {"logit_bias": {80: -100.0, 81: -5.0}},
        {"allowed_token_ids": [82, 83]},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logprobs": 2, "prompt_logprobs": 1},
    ]
    expected = {0: [80, 80, 80, 90], 1: [81, 81, 81, 90], 3: [80] * 3 + [83] * 2 + [90], 4: [80] * 3 + [83] * 3}
    expected |= {10: [82] * 3 + [83] * 3}
    for number, fields in enumerate(settings):
        (single,) = run(llm, ["A"], n=1, max_tokens=6, **fields)
        one = single.outputs[0]
        if number in expected:
            assert one.token_ids == expected[number], fields
        for n in (2, 3) if number < 3 else (2,):
            (several,) = run(llm, ["A"], n=n, max_tokens=6, **fields)
            assert [choice.index for choice in several.outputs] == list(range(n))
            for choice in several.outputs:
                assert (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) == (
                    one.text,
                    one.token_ids,
                    one.finish_reason,
                    one.stop_reason,
                ), fields
                assert choice.logprobs == one.logprobs
            assert several.prompt_logprobs == single.prompt_logprobs


# C07


@pytest.mark.parametrize("path", ROUTES)
def test_c07_seeded_choices_are_distinct_complete_and_repeatable(
    served: Any, sse: Sse, eventually: Callable[..., None], path: str
) -> None:
    """n=3, temperature 1, seed 7, twice whole and twice streamed, once to a reader that is slow."""
    body = {**body_of(path, "T"), "n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 20, "return_token_ids": True}
    body["ignore_eos"] = True
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}

    def collect(events: list[dict[str, Any]]) -> tuple[list[list[int]], dict[str, Any]]:
        ids: list[list[int]] = [[], [], []]
        for event in events:
            for choice in event["choices"]:
                ids[choice["index"]] += choice.get("token_ids", [])
        usage: dict[str, Any] = events[-1]["usage"]
        return ids, usage

    first = collect([served.post(path, body).json()])
    found = [collect([served.post(path, body).json()]), collect(sse(served.post(path, asked)))]
    connection = served.ask(path, asked)
    received = connection.recv(16)
    eventually(served.is_idle, 10.0)  # nothing more is read before the engine is done
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(4096)
    connection.close()
    lines = [line for line in received.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: {")]
    found.append(collect([json.loads(line[6:]) for line in lines]))
    ids, usage = first
    assert len({tuple(choice) for choice in ids}) == 3 and all(len(choice) == 20 for choice in ids)
    assert usage["prompt_tokens"] == 1 and usage["completion_tokens"] == 60
    for other_ids, other_usage in found:
        assert other_ids == ids
        assert {**other_usage, "prompt_tokens_details": None} == {**usage, "prompt_tokens_details": None}
    single = served.post(path, {**body, "n": 1}).json()
    assert single["choices"][0]["token_ids"] == ids[0]


# C08


def test_c08_a_prompt_that_never_fits_the_pool_is_refused_at_once(
    make_llm: Callable[..., Any], run: Callable[..., Any]
) -> None:
    """49 blocks of 4, a model's window of 512: the effective window is 196, and it is what the engine publishes."""
    llm = make_llm({"A": [80] * 300}, model={"max_model_len": 512})
    assert llm.info.max_model_len == 196 and llm.info.max_prompt_len == 195
    for size in (196, 197, 300, 511, 512):
        with pytest.raises(RequestError) as caught:
            run(llm, [[36] * size], max_tokens=1)
        assert caught.value.code == "context_length_exceeded"
        assert llm.stats.num_waiting == 0
        assert run(llm, ["A"], max_tokens=3)[0].outputs[0].token_ids == [80] * 3
    for size, limit, count in ((195, None, 1), (150, 100, 46), (150, 20, 20), (1, None, 195)):
        (output,) = run(llm, [[36] * size], max_tokens=limit, ignore_eos=True)
        assert len(output.outputs[0].token_ids) == count and output.outputs[0].finish_reason == "length"


def test_c08_the_effective_window_is_published(make_api: Callable[..., Any]) -> None:
    api = make_api(FakeEngine(max_model_len=196))
    assert api.get("/v1/models").json()["data"][0]["max_model_len"] == 196
    assert api.complete([36] * 300).json()["error"]["code"] == "context_length_exceeded"
    assert api.complete("abc").status_code == 200


# C09


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_c09_best_of_is_refused_whatever_it_says(make_api: Callable[..., Any], path: str, stream: bool) -> None:
    """The rule of this version: best_of does not exist, and the message names n. No pair is accepted by accident."""
    api = make_api(FakeEngine())
    values: list[Any] = [0, 1, 2, 3, 5, -1, 1.5, 2.0, "2", True, [2], {}, 10**9]
    for best_of in values:
        for n in (None, 1, 2, 3):
            reply = api.post(path, {**body_of(path, "abc"), "n": n, "best_of": best_of, "stream": stream})
            error = reply.json()["error"]
            assert reply.status_code == 400 and error["param"] == "best_of" and "use n" in error["message"]
    assert not api.engine.requests
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    for n in (0, -1, 129, 2**31):
        reply = api.post(path, {**body_of(path, "abc"), "n": n, "stream": stream})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "n"
