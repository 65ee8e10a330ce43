"""Each request field that clients of vLLM know, on both generating routes, streaming and not: its effect or its refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel

from hotswap.core.testing.fake_engine import FakeEngine, byte_tokenizer

ROUTES = ["completions", "chat"]
every_route = pytest.mark.parametrize("route", ROUTES)
every_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
PROMPT = "hello"
A_ID = byte_tokenizer().encode("a")[0]  # the letters follow it


@dataclass
class Answer:
    """A call's answer in one form, whole or streamed. Per choice: text, why it ended, and its logprobs."""

    status: int
    body: Any
    texts: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    stop: dict[int, Any] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None


def ask(api: Any, route: str, stream: bool, **fields: Any) -> Answer:
    """One request; its stream, if it is one, put together again."""
    if stream:
        fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    reply = api.complete(PROMPT, **fields) if route == "completions" else api.chat(PROMPT, **fields)
    if reply.status_code != 200 or not stream:
        answer = Answer(reply.status_code, reply.json())
        parts = [answer.body] if reply.status_code == 200 else []
    else:
        lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        parts = [json.loads(line) for line in lines[:-1]]
        answer = Answer(200, parts)
    for part in parts:
        assert "error" not in part, part
        answer.usage = part.get("usage") or answer.usage
        for choice in part["choices"]:
            _collect(answer, choice)
    return answer


def _collect(answer: Answer, choice: dict[str, Any]) -> None:
    index = choice["index"]
    message = choice.get("message") or choice.get("delta") or {}
    answer.texts[index] = answer.texts.get(index, "") + (choice.get("text") or message.get("content") or "")
    if choice["finish_reason"] is not None:
        answer.finish[index], answer.stop[index] = choice["finish_reason"], choice["stop_reason"]
    logprobs = choice.get("logprobs")
    if logprobs:
        positions = logprobs["content"] if "content" in logprobs else logprobs["tokens"]
        answer.logprobs.setdefault(index, []).extend(positions)
    answer.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])


def refused(answer: Answer, param: str) -> str:
    assert answer.status == 400, answer.body
    assert answer.body["error"]["param"] == param
    return str(answer.body["error"]["message"])


def letters(count: int) -> FakeEngine:
    """An engine that says abcdef..., whatever it is asked."""
    return FakeEngine(lambda prompt, choice: [A_ID + k for k in range(count)])


# Fields that the engine's sampler and scheduler act on: they must reach it, as they were said.

PASSED_ON: list[tuple[str, Any, Any]] = [
    ("temperature", 0.5, 0.5),
    ("top_p", 0.25, 0.25),
    ("top_k", 7, 7),
    ("top_k", -1, -1),
    ("min_p", 0.125, 0.125),
    ("repetition_penalty", 1.5, 1.5),
    ("presence_penalty", -0.5, -0.5),
    ("frequency_penalty", 0.5, 0.5),
    ("seed", 41, 41),
    ("logit_bias", {"80": -3.5}, {80: -3.5}),
    ("bad_words", ["no"], ["no"]),
    ("allowed_token_ids", [80, 81], [80, 81]),
    ("min_tokens", 2, 2),
    ("ignore_eos", True, True),
    ("stop_token_ids", [300], [300]),
    ("skip_special_tokens", False, False),
    ("spaces_between_special_tokens", False, False),
]


@every_route
@every_way
@pytest.mark.parametrize(("name", "value", "expected"), PASSED_ON)
def test_sampling_fields_reach_the_engine(
    api: Any, route: str, stream: bool, name: str, value: Any, expected: Any
) -> None:
    assert ask(api, route, stream, max_tokens=3, **{name: value}).status == 200
    assert getattr(api.engine.requests[-1].sampling, name) == expected


# Fields whose effect is in the answer.


@every_route
@every_way
def test_n(api: Any, route: str, stream: bool) -> None:
    answer = ask(api, route, stream, n=3, max_tokens=2)
    assert sorted(answer.texts) == sorted(answer.finish) == [0, 1, 2]
    assert answer.usage is not None and answer.usage["completion_tokens"] == 6


@every_route
@every_way
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_length(make_api: Callable[..., Any], route: str, stream: bool, name: str) -> None:
    answer = ask(make_api(letters(20)), route, stream, **{name: 4})
    assert answer.texts == {0: "abcd"} and answer.finish == {0: "length"} and answer.stop == {0: None}


@every_route
@every_way
def test_stop_and_stop_reason(make_api: Callable[..., Any], route: str, stream: bool) -> None:
    api = make_api(letters(20))
    answer = ask(api, route, stream, stop=["zz", "de"])
    assert answer.texts == {0: "abc"} and answer.finish == {0: "stop"} and answer.stop == {0: "de"}
    answer = ask(api, route, stream, stop="de", include_stop_str_in_output=True)
    assert answer.texts == {0: "abcde"}
    assert ask(api, route, stream, stop="zz", max_tokens=20).stop == {0: None}


@every_route
@every_way
def test_truncate_prompt_tokens(api: Any, route: str, stream: bool) -> None:
    answer = ask(api, route, stream, truncate_prompt_tokens=3, max_tokens=1)
    assert answer.usage is not None and answer.usage["prompt_tokens"] == 3
    assert len(api.engine.requests[-1].prompt_token_ids) == 3
    refused(ask(api, route, stream, truncate_prompt_tokens=0), "truncate_prompt_tokens")


@every_way
def test_logprobs(make_api: Callable[..., Any], stream: bool) -> None:
    api = make_api(letters(3))
    text = ask(api, "completions", stream, logprobs=2)
    assert text.logprobs[0][:3] == ["a", "b", "c"]
    chat = ask(api, "chat", stream, logprobs=True, top_logprobs=2)
    assert [position["token"] for position in chat.logprobs[0]][:3] == ["a", "b", "c"]
    assert all(len(position["top_logprobs"]) == 2 for position in chat.logprobs[0])
    assert all(not p["top_logprobs"] for p in ask(api, "chat", stream, logprobs=True).logprobs[0])
    refused(ask(api, "chat", stream, top_logprobs=2), "top_logprobs")
    refused(ask(api, "completions", stream, logprobs=21), "logprobs")
    refused(ask(api, "chat", stream, logprobs=True, top_logprobs=21), "top_logprobs")


@every_route
@every_way
def test_return_tokens_as_token_ids(make_api: Callable[..., Any], route: str, stream: bool) -> None:
    fields: dict[str, Any] = {"logprobs": 1} if route == "completions" else {"logprobs": True}
    answer = ask(make_api(letters(3)), route, stream, return_tokens_as_token_ids=True, max_tokens=2, **fields)
    names = [p if isinstance(p, str) else p["token"] for p in answer.logprobs[0]]
    assert names == [f"token_id:{A_ID}", f"token_id:{A_ID + 1}"]


@every_route
@every_way
def test_return_token_ids(make_api: Callable[..., Any], route: str, stream: bool) -> None:
    answer = ask(make_api(letters(20)), route, stream, return_token_ids=True, max_tokens=3)
    assert answer.token_ids[0] == [A_ID + k for k in range(3)]
    assert '"prompt_token_ids"' in json.dumps(answer.body)


@every_route
def test_prompt_logprobs(api: Any, route: str) -> None:
    answer = ask(api, route, False, prompt_logprobs=1, max_tokens=1)
    found = answer.body["choices"][0].get("prompt_logprobs") or answer.body.get("prompt_logprobs")
    assert found[0] is None and answer.usage is not None and len(found) == answer.usage["prompt_tokens"]
    refused(ask(api, route, True, prompt_logprobs=1), "prompt_logprobs")


@every_way
def test_prompt_forms(api: Any, stream: bool) -> None:
    ids = api.post("/tokenize", {"prompt": "abc"}).json()["tokens"]
    expected = {"abc": 1, ("abc", "de"): 2, tuple(ids): 1, (tuple(ids), tuple(ids)): 2}
    for prompt, count in expected.items():
        value = prompt if isinstance(prompt, str) else json.loads(json.dumps(prompt))
        reply = api.complete(value, stream=stream, max_tokens=4, return_token_ids=True)
        assert reply.status_code == 200, reply.text
        assert len({r.request_id for r in api.engine.requests}) == count
        assert api.engine.requests[0].prompt_token_ids == ids
        api.engine.requests.clear()


@every_way
def test_add_special_tokens(make_api: Callable[..., Any], stream: bool) -> None:
    api = make_api(FakeEngine(add_bos=True))
    ask(api, "completions", stream, max_tokens=1)
    with_bos = api.engine.requests[-1].prompt_token_ids
    ask(api, "completions", stream, max_tokens=1, add_special_tokens=False)
    assert [0, *api.engine.requests[-1].prompt_token_ids] == with_bos
    ask(api, "chat", stream, max_tokens=1, add_special_tokens=True)
    assert api.engine.requests[-1].prompt_token_ids.count(0) == 1  # a chat has exactly one BOS, whatever is said


@every_way
def test_echo(make_api: Callable[..., Any], stream: bool) -> None:
    api = make_api(letters(20))
    assert ask(api, "completions", stream, echo=True, max_tokens=2).texts == {0: "helloab"}
    scored = ask(api, "completions", stream, echo=True, max_tokens=0, logprobs=1)
    assert scored.texts == {0: "hello"} and len(scored.logprobs[0]) == len(api.engine.requests[-1].prompt_token_ids)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So "}]
    body = {"messages": messages, "echo": True, "continue_final_message": True, "max_tokens": 2}
    assert api.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "So ab"


@every_way
def test_suffix(api: Any, stream: bool) -> None:
    assert "fills in the middle" in refused(ask(api, "completions", stream, suffix="end"), "suffix")
    assert ask(api, "completions", stream, suffix="").status == 200


@every_way
def test_chat_template_is_gated(make_api: Callable[..., Any], stream: bool) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}!"
    message = refused(ask(make_api(), "chat", stream, chat_template=template), "chat_template")
    assert "--trust-request-chat-template" in message
    open_api = make_api(trust_request_chat_template=True)
    assert ask(open_api, "chat", stream, chat_template=template, max_tokens=1).status == 200
    assert open_api.engine.tokenizer.decode(open_api.engine.requests[-1].prompt_token_ids) == "hello!"


@every_way
def test_chat_prompt_fields(make_api: Callable[..., Any], stream: bool) -> None:
    """chat_template_kwargs and documents reach the template; the two flags decide how the prompt ends."""
    template = (
        "{{ mood }}{% for d in documents or [] %}<{{ d.title }}>{% endfor %}"
        "{% for m in messages %}{{ m.content }}|{% endfor %}{% if add_generation_prompt %}GO{% endif %}"
    )
    api = make_api(FakeEngine(chat_template=template))

    def prompt(**fields: Any) -> str:
        assert ask(api, "chat", stream, max_tokens=1, **fields).status == 200
        return str(api.engine.tokenizer.decode(api.engine.requests[-1].prompt_token_ids))

    assert prompt() == "hello|GO"
    assert prompt(add_generation_prompt=False) == "hello|"
    assert prompt(chat_template_kwargs={"mood": "sad", "tokenize": 1}) == "sadhello|GO"
    assert prompt(documents=[{"title": "T", "text": "x"}]) == "<T>hello|GO"
    assert prompt(continue_final_message=True) == "hello"
    refused(ask(api, "chat", stream, continue_final_message=True, add_generation_prompt=True), "continue_final_message")


@every_route
@every_way
def test_logits_processors_are_named_only(make_api: Callable[..., Any], route: str, stream: bool) -> None:
    """A name is looked up among the active plugins, by the engine's front end; it is never code."""
    api = make_api()
    value: Any
    for value in ({"nope": {"a": 1}}, ["nope"], {"os.system": {}}):
        refused(ask(api, route, stream, logits_processors=value), "logits_processors")
    for value in ("nope", [1], [["nope"]], {"nope": 1}, [{"nope": {}}], ["x"] * 17):
        refused(ask(api, route, stream, logits_processors=value), "logits_processors")
    for value in (None, [], {}):
        assert ask(api, route, stream, logits_processors=value, max_tokens=1).status == 200

    class Strength(BaseModel):
        strength: int = 1

    api = make_api(FakeEngine(logits_processors={"boost": Strength}))
    for value, expected in (["boost"], 1), ({"boost": {"strength": 5}}, 5), ({"boost": {}}, 1):
        assert ask(api, route, stream, logits_processors=value, max_tokens=1).status == 200
        assert Strength(**api.engine.requests[-1].sampling.logits_processors["boost"]).strength == expected
    refused(ask(api, route, stream, logits_processors={"boost": {"strength": "x"}}), "logits_processors")


# Refused, with a word that says so; the value that asks for nothing passes.


@every_route
@every_way
@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("use_beam_search", True, False),
        ("length_penalty", 2.0, 1.0),
        ("structured_outputs", {"regex": "a+"}, None),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, {"type": "text"}),
        ("response_format", {"type": "structural_tag"}, {"type": "text"}),
        ("reasoning_effort", "high", "none"),
        ("thinking_token_budget", 100, -1),
        ("prompt_embeds", "AAAA", None),
    ],
)
def test_what_is_not_served_says_so(api: Any, route: str, stream: bool, name: str, value: Any, neutral: Any) -> None:
    assert "not served by this version" in refused(ask(api, route, stream, **{name: value}), name)
    assert ask(api, route, stream, max_tokens=1, **{name: neutral}).status == 200


@every_route
@every_way
@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "best_of"])
def test_what_is_gone_names_the_new_field(api: Any, route: str, stream: bool, name: str) -> None:
    message = refused(ask(api, route, stream, **{name: 2}), name)
    assert ("use n" if name == "best_of" else "structured_outputs") in message


@every_route
@every_way
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metadata", {"a": "b"}),
        ("store", True),
        ("service_tier", "auto"),
        ("safety_identifier", "x"),
        ("prompt_cache_key", "x"),
        ("include_reasoning", False),
        ("session_id", "s"),
    ],
)
def test_what_has_no_effect_is_accepted(api: Any, route: str, stream: bool, name: str, value: Any) -> None:
    plain = ask(api, route, stream, max_tokens=3)
    assert ask(api, route, stream, max_tokens=3, **{name: value}).texts == plain.texts


# Serving.


@every_route
@every_way
def test_serving_fields(api: Any, route: str, stream: bool) -> None:
    api.engine.info.uses_priority = True
    answer = ask(api, route, stream, priority=-2, cache_salt="tenant-1", user="u", request_id="mine", max_tokens=1)
    request = api.engine.requests[-1]
    assert (request.priority, request.cache_salt, request.user) == (-2, "tenant-1", "u")
    head = answer.body[0] if stream else answer.body
    assert head["id"].endswith("-mine")


@every_route
@every_way
def test_cached_tokens(api: Any, route: str, stream: bool) -> None:
    def cached(salt: str | None) -> int:
        if route == "completions":
            reply = api.complete("x" * 40, max_tokens=1, cache_salt=salt, stream=stream)
        else:
            reply = api.chat("x" * 40, max_tokens=1, cache_salt=salt, stream=stream)
        assert reply.status_code == 200
        return int(api.metric("prompt_tokens_cached_total"))

    assert cached(None) == 0
    before = cached(None)
    assert before >= 16
    assert cached("other") == before
    usage = ask(api, route, stream, max_tokens=1).usage
    assert usage is not None and usage["prompt_tokens_details"] == {"cached_tokens": 0}


@every_route
def test_stream_options(api: Any, sse: Callable[[Any], Any], route: str) -> None:
    call = api.complete if route == "completions" else api.chat
    assert refused(ask(api, route, False, stream_options={"include_usage": True}), "stream_options")
    plain = sse(call(PROMPT, stream=True, max_tokens=3))
    assert not any("usage" in chunk for chunk in plain)
    with_last = sse(call(PROMPT, stream=True, max_tokens=3, stream_options={"include_usage": True}))
    assert with_last[-1]["choices"] == [] and with_last[-1]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in with_last[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    every = sse(call(PROMPT, stream=True, max_tokens=3, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in every]
    assert counts == sorted(counts) and counts[-1] == 3


def test_max_model_len_is_published(make_api: Callable[..., Any]) -> None:
    """The effective one: what the cache holds, when that is less than the model's."""
    api = make_api(FakeEngine(max_model_len=77))
    assert api.get("/v1/models").json()["data"][0]["max_model_len"] == 77
