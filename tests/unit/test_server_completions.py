"""/v1/completions: forms of prompts, echo, logprobs, choices, streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from hotswap.core.testing.fake_engine import FakeEngine


def joined(chunks: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def texts(reply: Any) -> list[str]:
    assert reply.status_code == 200, reply.text
    assert [choice["index"] for choice in reply.json()["choices"]] == list(range(len(reply.json()["choices"])))
    return [choice["text"] for choice in reply.json()["choices"]]


def test_forms_of_prompts(api: Any) -> None:
    assert texts(api.complete("ab")) == ["ba"]
    assert texts(api.complete(["ab", "xy"])) == ["ba", "yx"]
    ids = api.post("/tokenize", {"prompt": "ab"}).json()["tokens"]
    assert texts(api.complete(ids)) == ["ba"]
    assert texts(api.complete([ids, ids[:1]])) == ["ba", "a"]
    usage = api.complete([ids, ids[:1]], n=2).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 10, 13)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [[]],
        [1, "a"],
        ["a", 1],
        [[1], "a"],
        [[1], 1],
        [[1, "a"]],
        [-1],
        [320],
        [[320]],
        [True],
        [1.0],
        {},
        5,
        [None],
        [[[1]]],
    ],
)
def test_bad_prompts(api: Any, prompt: Any) -> None:
    reply = api.complete(prompt)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith("prompt")


def test_bos(make_api: Callable[..., Any]) -> None:
    api = make_api(FakeEngine(add_bos=True))
    assert api.post("/tokenize", {"prompt": "ab"}).json()["tokens"][0] == 0
    assert api.complete("", max_tokens=1).json()["usage"]["prompt_tokens"] == 1
    assert api.complete("", max_tokens=1, add_special_tokens=False).status_code == 400
    messages = [{"role": "user", "content": "hi"}]
    assert api.post("/tokenize", {"messages": messages}).json()["tokens"].count(0) == 1
    reply = api.complete("ab", echo=True, logprobs=0, max_tokens=1).json()["choices"][0]
    assert reply["text"] == "abb"
    assert reply["logprobs"]["tokens"] == ["<s>", "a", "b", "b"]
    assert reply["logprobs"]["text_offset"] == [0, 0, 1, 2]


def test_special_tokens_in_text_are_text(api: Any) -> None:
    assert 3 not in api.post("/tokenize", {"prompt": "<|im_end|>"}).json()["tokens"]


def test_echo(api: Any) -> None:
    ids = api.post("/tokenize", {"prompt": "the cat"}).json()["tokens"]
    for prompt in ("the cat", ids):
        assert texts(api.complete(prompt, echo=True, max_tokens=1)) == ["the catt"]
        assert texts(api.complete([prompt, prompt], echo=True, n=2, max_tokens=1)) == ["the catt"] * 4


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_in_a_stream(api: Any, sse: Callable[[Any], Any], n: int, max_tokens: int, logprobs: int | None) -> None:
    fields = {"echo": True, "n": n, "max_tokens": max_tokens, "logprobs": logprobs}
    whole = api.complete(["the cat", "xyz"], **fields).json()["choices"]
    chunks = sse(api.complete(["the cat", "xyz"], stream=True, **fields))
    assert joined(chunks) == {choice["index"]: choice["text"] for choice in whole}
    assert [choice["text"][:2] for choice in whole] == ["th"] * n + ["xy"] * n
    if logprobs is not None:
        for choice in whole:
            streamed: dict[str, list[Any]] = {}
            for chunk in chunks:
                for part in chunk["choices"]:
                    if part["index"] == choice["index"]:
                        for key, values in part["logprobs"].items():
                            streamed.setdefault(key, []).extend(values)
            assert streamed == choice["logprobs"]
            assert "".join(streamed["tokens"]) == choice["text"]
            starts = [sum(map(len, streamed["tokens"][:k])) for k in range(len(streamed["tokens"]))]
            assert streamed["text_offset"] == starts


def test_scoring(api: Any) -> None:
    reply = api.complete("the cat", echo=True, logprobs=1, max_tokens=0).json()
    choice = reply["choices"][0]
    assert choice["text"] == "the cat" and choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value == -0.5 for value in choice["logprobs"]["token_logprobs"][1:])
    one = api.complete("a", echo=True, logprobs=1, max_tokens=0).json()["choices"][0]
    assert one["logprobs"]["tokens"] == ["a"] and one["logprobs"]["token_logprobs"] == [None]


def test_logprobs(api: Any) -> None:
    assert api.complete("ab").json()["choices"][0]["logprobs"] is None
    zero = api.complete("ab", logprobs=0).json()["choices"][0]["logprobs"]
    assert zero["top_logprobs"][0] == {"b": -0.5}
    two = api.complete("ab", logprobs=3).json()["choices"][0]["logprobs"]
    assert two["top_logprobs"][0] == {"b": -0.5, "c": -1.0, "d": -9999.0}
    for bad in (-1, 21, True, "5"):
        assert api.complete("ab", logprobs=bad).status_code == 400
    ids = api.complete("ab", logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert ids["tokens"][0].startswith("token_id:")
    json.dumps(two, allow_nan=False)


def test_bytes_of_split_characters(api: Any) -> None:
    tokens = api.complete("é", logprobs=0).json()["choices"][0]["logprobs"]["tokens"]
    assert all("\ufffd" not in token for token in tokens if token.startswith("bytes:"))
    assert any(token.startswith("bytes:\\x") for token in tokens)


def test_prompt_logprobs(api: Any) -> None:
    choice = api.complete("ab", prompt_logprobs=2, max_tokens=1).json()["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert [entry["rank"] for entry in second.values()] == [1, 2]
    assert {entry["decoded_token"] for entry in second.values()} == {"b", "c"}
    assert api.complete("ab", prompt_logprobs=2, stream=True).status_code == 400


def test_return_token_ids(api: Any, sse: Callable[[Any], Any]) -> None:
    ids = api.post("/tokenize", {"prompt": "abc"}).json()["tokens"]
    choice = api.complete("abc", return_token_ids=True, max_tokens=3).json()["choices"][0]
    assert choice["prompt_token_ids"] == ids and choice["token_ids"] == ids[::-1]
    chunks = sse(api.complete("abc", return_token_ids=True, max_tokens=3, stream=True))
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == ids[::-1]
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [ids, None, None]


def test_stop_and_finish(api: Any, sse: Callable[[Any], Any]) -> None:
    choice = api.complete("cba", stop="b").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", "b")
    kept = api.complete("cba", stop=["b"], include_stop_str_in_output=True).json()["choices"][0]
    assert kept["text"] == "ab"
    assert api.complete("cba", stop="b").json()["usage"]["completion_tokens"] == 2
    whole = api.complete("cba").json()["choices"][0]
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == ("abc", "stop", None)
    assert joined(sse(api.complete("cba", stop="b", stream=True))) == {0: "a"}


def test_stream_protocol(api: Any, sse: Callable[[Any], Any]) -> None:
    reply = api.complete(["abcd", "xy"], n=2, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in reply.headers
    chunks = sse(reply)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    for index in range(4):
        reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert reasons[:-1] == [None] * (len(reasons) - 1) and reasons[-1] == "stop"
    assert joined(chunks) == {0: "dcba", 1: "dcba", 2: "yx", 3: "yx"}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"continuous_usage_stats": True}])
def test_no_usage_unless_asked(api: Any, sse: Callable[[Any], Any], options: Any) -> None:
    chunks = sse(api.complete("ab", stream=True, stream_options=options))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_usage_in_the_last_chunk(api: Any, sse: Callable[[Any], Any]) -> None:
    whole = api.complete("ab").json()["usage"]
    chunks = sse(api.complete("ab", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    every = {"include_usage": True, "continuous_usage_stats": True}
    chunks = sse(api.complete("ab", stream=True, stream_options=every))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] > 0 and chunks[-1]["usage"] == whole
    for wrong in ({"include_usage": "yes"}, {"usage": True}, 5):
        assert api.complete("ab", stream=True, stream_options=wrong).status_code == 400
    assert api.complete("ab", stream_options={"include_usage": True}).json()["error"]["param"] == "stream_options"


def test_suffix(api: Any) -> None:
    assert api.complete("a", suffix="x").json()["error"]["param"] == "suffix"
    assert api.complete("a", suffix=None).status_code == 200


def test_truncation(api: Any) -> None:
    reply = api.complete("abcdef", truncate_prompt_tokens=2, echo=True, max_tokens=2).json()
    assert reply["usage"]["prompt_tokens"] == 2
    assert reply["choices"][0]["text"] == "effe"
    assert api.complete("x" * 1000, truncate_prompt_tokens=10).json()["usage"]["prompt_tokens"] == 10
    assert api.complete("abc", truncate_prompt_tokens=0).status_code == 400


def test_cached_tokens_and_salt(api: Any) -> None:
    prompt = "x" * 40

    def cached(**fields: Any) -> int:
        usage = api.complete(prompt, max_tokens=1, **fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a"), cached()] == [0, 0, 32, 0]


def test_many_short_texts_are_work_for_a_thread_too(
    make_api: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    calls = []
    to_thread = asyncio.to_thread

    async def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[0])
        return await to_thread(*arguments, **options)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    api = make_api(FakeEngine(lambda prompt, choice: [80], max_model_len=4096))
    assert api.complete(["x" * 1000] * 2, max_tokens=1).status_code == 200
    assert api.chat("x" * 1000, max_tokens=1).status_code == 200
    assert api.post("/detokenize", {"tokens": [80] * 100}).status_code == 200
    assert not calls
    assert api.complete(["x" * 1000] * 5, max_tokens=1).status_code == 200
    assert len(calls) == 5
    assert api.chat("x", max_tokens=1, documents=[{"text": "y" * 5000}]).status_code == 200
    assert api.chat("x", max_tokens=1, chat_template_kwargs={"a": ["y"] * 5000}).status_code == 200
    assert api.post("/detokenize", {"tokens": [80] * 5000}).status_code == 200
    assert len(calls) == 8


def test_a_text_that_cannot_fit_is_not_tokenized(api: Any) -> None:
    def explode(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenized")

    api.engine.tokenizer.encode = explode
    assert api.complete("x" * 300_000).json()["error"]["code"] == "context_length_exceeded"


def test_slow_reader_gets_merged_deltas(make_api: Callable[..., Any]) -> None:
    """The consumer sleeps while the engine goes on: fewer deltas, every token once."""
    from hotswap.core.sampling_params import SamplingParams

    engine = FakeEngine(lambda prompt, choice: [80 + n % 20 for n in range(60)])
    api = make_api(engine)

    async def consume() -> list[list[int]]:
        import asyncio

        deltas = []
        stream = engine.generate([80], SamplingParams(max_tokens=60, logprobs=1), request_id="r")
        async for output in stream:
            deltas.append(output.outputs[0].token_ids)
            assert len(output.outputs[0].logprobs or ()) == len(deltas[-1])
            await asyncio.sleep(0.01)
        return deltas

    deltas = api.runner.run(consume())
    assert [token for delta in deltas for token in delta] == [80 + n % 20 for n in range(60)]
    assert len(deltas) < 30
