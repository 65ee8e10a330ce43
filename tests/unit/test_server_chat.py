"""/v1/chat/completions, /tokenize, /v1/models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hotswap.core.testing.fake_engine import FakeEngine

SAY = [ord(c) for c in "héy 😀".encode().decode("latin-1")]


def saying(text: str) -> FakeEngine:
    engine = FakeEngine()
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    engine._script = lambda prompt, choice: tokenizer.encode(text, add_special_tokens=False)
    return engine


def test_whole(make_api: Callable[..., Any]) -> None:
    api = make_api(saying("héy 😀"))
    reply = api.chat("hi").json()
    assert reply["object"] == "chat.completion" and reply["model"] == "tiny" and reply["id"].startswith("chatcmpl-")
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "héy 😀", "refusal": None}
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("n", [1, 2])
def test_stream(make_api: Callable[..., Any], sse: Callable[[Any], Any], n: int) -> None:
    api = make_api(saying("héy 😀"))
    chunks = sse(api.chat("hi", stream=True, n=n))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    for index in range(n):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in c["delta"] for c in choices[1:])
        assert "".join(c["delta"].get("content", "") for c in choices) == "héy 😀"
        assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "stop"
        assert not any("\ufffd" in c["delta"].get("content", "") for c in choices)


@pytest.mark.parametrize("top", [None, 0, 2])
def test_logprobs_spell_the_text(make_api: Callable[..., Any], sse: Callable[[Any], Any], top: int | None) -> None:
    api = make_api(saying("é😀"))
    whole = api.chat("hi", logprobs=True, top_logprobs=top).json()
    content = whole["choices"][0]["logprobs"]["content"]
    # The end-of-sequence token is one of the tokens; its bytes are not shown in the text.
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == "é😀"
    assert "".join(entry["token"] for entry in content[:-1]) == "é😀"
    assert len(content) == whole["usage"]["completion_tokens"]
    assert {len(entry["top_logprobs"]) for entry in content} == {top or 0}
    streamed = [
        entry
        for chunk in sse(api.chat("hi", logprobs=True, top_logprobs=top, stream=True))
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content


def test_logprobs_rules(api: Any) -> None:
    assert api.chat(logprobs=False).json()["choices"][0]["logprobs"] is None
    assert api.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    for fields in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}):
        assert api.chat(**fields).json()["error"]["param"] == "top_logprobs"
    assert api.chat(logprobs=2).json()["error"]["param"] == "logprobs"


def prompt_ids(api: Any, messages: Any, **fields: Any) -> list[int]:
    reply = api.post("/tokenize", {"messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["tokens"])


def test_content_forms_give_one_prompt(api: Any) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    for role in ("system", "user", "assistant", "tool"):
        assert prompt_ids(api, [{"role": role, "content": parts}]) == prompt_ids(
            api, [{"role": role, "content": "hello"}]
        )
    assert prompt_ids(api, [{"role": "developer", "content": "x"}]) == prompt_ids(
        api, [{"role": "system", "content": "x"}]
    )


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        ["hello"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": 5, "content": "x"}],
        [{"content": "x"}],
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "not json"}}]}],
    ],
)
def test_bad_messages(api: Any, messages: Any) -> None:
    reply = api.post("/v1/chat/completions", {"messages": messages})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith("messages")


def test_continue_final_message(api: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer is "}]
    ids = prompt_ids(api, messages, continue_final_message=True)
    assert api.post("/detokenize", {"tokens": ids}).json()["prompt"].endswith("assistant\nThe answer is ")
    body = {"messages": messages, "continue_final_message": True}
    assert api.post("/v1/chat/completions", {**body, "add_generation_prompt": True}).status_code == 400
    plain = api.post("/v1/chat/completions", {**body, "max_tokens": 3}).json()["choices"][0]["message"]["content"]
    echoed = api.post("/v1/chat/completions", {**body, "max_tokens": 3, "echo": True}).json()["choices"][0]["message"][
        "content"
    ]
    assert not plain.startswith("The answer") and echoed == "The answer is " + plain
    without = prompt_ids(api, messages[:1], add_generation_prompt=False)
    assert len(without) < len(prompt_ids(api, messages[:1]))


def test_request_templates_are_gated(make_api: Callable[..., Any]) -> None:
    hostile = "{% for i in range(10**9) %}x{% endfor %}"
    api = make_api()
    for path in ("/v1/chat/completions", "/tokenize"):
        for template in ("{{ messages }}", hostile):
            reply = api.post(path, {"messages": [{"role": "user", "content": "x"}], "chat_template": template})
            assert reply.json()["error"]["param"] == "chat_template", reply.text
    assert (
        api.chat(chat_template_kwargs={"messages": [], "tokenize": True, "add_generation_prompt": False}).status_code
        == 200
    )


def test_no_template(make_api: Callable[..., Any]) -> None:
    api = make_api(FakeEngine(chat_template=None))
    assert "no chat template" in api.chat().json()["error"]["message"]
    assert api.complete().status_code == 200


def test_long_conversations_are_refused_by_size(api: Any) -> None:
    assert api.chat("x" * 300_000).json()["error"]["code"] == "context_length_exceeded"
    assert api.chat("x" * 1000).json()["error"]["code"] == "context_length_exceeded"


def test_return_token_ids(api: Any, sse: Callable[[Any], Any]) -> None:
    ids = prompt_ids(api, [{"role": "user", "content": "hello"}])
    reply = api.chat(return_token_ids=True, max_tokens=2, prompt_logprobs=0).json()
    assert reply["prompt_token_ids"] == ids and len(reply["choices"][0]["token_ids"]) == 2
    assert len(reply["prompt_logprobs"]) == len(ids) and reply["prompt_logprobs"][0] is None
    chunks = sse(api.chat(return_token_ids=True, max_tokens=2, stream=True))
    assert chunks[0]["prompt_token_ids"] == ids
    assert sum(len(c.get("token_ids", ())) for chunk in chunks for c in chunk["choices"]) == 2


def test_labels(api: Any) -> None:
    assert api.chat(request_id="abc").json()["id"] == "chatcmpl-abc"
    assert [len({api.chat(request_id="abc").json()["id"] for _ in range(2)})] == [1]
    assert len({request.request_id for request in api.engine.requests}) == len(api.engine.requests)


def test_models(make_api: Callable[..., Any]) -> None:
    api = make_api(engine_settings={"served_model_name": ["main", "org/alias"]})
    cards = api.get("/v1/models").json()
    assert [card["id"] for card in cards["data"]] == ["main", "org/alias"] and cards["object"] == "list"
    assert cards["data"][0]["max_model_len"] == 256
    assert api.get("/v1/models/org/alias").json()["id"] == "org/alias"
    assert api.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    for name in (None, "", "main"):
        assert api.chat(model=name).json()["model"] == "main"
    assert api.chat(model="org/alias").json()["model"] == "org/alias"
    assert api.chat(model="tiny").status_code == 404


def test_tokenize(api: Any) -> None:
    reply = api.post("/tokenize", {"prompt": "the cat", "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"]) and reply["max_model_len"] == 256
    assert api.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": "the cat"}
    assert api.post("/tokenize", {"prompt": "x" * 1000}).json()["count"] == 1000
    for body in ({}, {"prompt": "a", "messages": []}, {"prompt": 5}, {"prompt": "a", "foo": 1}):
        assert api.post("/tokenize", body).status_code == 400
    for tokens in (None, ["a"], [True], [-1], [320], "x"):
        assert api.post("/detokenize", {"tokens": tokens}).status_code == 400


def test_without_tokenizer(make_api: Callable[..., Any]) -> None:
    engine = FakeEngine()
    engine.tokenizer = None
    api = make_api(engine)
    assert api.complete([80, 81], max_tokens=1).status_code == 200
    for reply in (api.complete("text"), api.chat("x"), api.complete([80], stop="x"), api.complete([80], echo=True)):
        assert reply.status_code == 400, reply.text
