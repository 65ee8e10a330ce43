"""S-32, S-33, S-38, S-40, S-41, S-43 to S-48: what one request may ask for, and how much of it there may be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from hotswap.core.clock import SystemClock
from hotswap.core.engine.client import EngineClient
from hotswap.core.engine.engine_core import EngineCore
from hotswap.core.engine.input_processor import InputLimits, InputProcessor
from hotswap.core.engine.wire import EngineRequest
from hotswap.core.errors import RequestError
from hotswap.core.sampling_params import SamplingParams
from hotswap.core.testing.fake_engine import FakeEngine

JSON = {"content-type": "application/json"}
ROUTES = ["completions", "chat"]
every_route = pytest.mark.parametrize("route", ROUTES)
every_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def ask(api: Any, route: str, **fields: Any) -> Any:
    return api.complete(**fields) if route == "completions" else api.chat(**fields)


def refused(reply: Any, param: str | None = None) -> str:
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert (error["param"] or "").partition("[")[0].partition(".")[0] == param, error
    return str(error["message"])


def still_works(api: Any) -> None:
    assert api.complete("a", max_tokens=1).status_code == 200


def test_s32_prompts_times_n_are_bounded(make_api: Callable[..., Any]) -> None:
    api = make_api(max_requests_per_call=8)
    for prompts, n in ((9, 1), (5, 2), (1, 9), (1, 128), (10_000, 128)):
        message = refused(api.complete(["a"] * prompts, n=n))
        assert "--max-requests-per-call" in message
    assert not api.engine.requests
    assert len(api.complete(["a"] * 4, n=2, max_tokens=1).json()["choices"]) == 8


# S-33. The gate is in the renderer: every route that renders has it.

TEMPLATES = [
    "{{ messages }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_s33_templates_of_requests_are_refused_on_every_route(api: Any, template: str) -> None:
    messages = [{"role": "user", "content": "a"}]
    paths = ["/v1/chat/completions", "/tokenize"]
    for path in paths:
        for stream in ({}, {"stream": True}) if path.startswith("/v1") else ({},):
            reply = api.post(path, {"messages": messages, "chat_template": template, **stream})
            assert "--trust-request-chat-template" in refused(reply, "chat_template")
    assert set(_paths_with("chat_template", api)) == set(paths), "a new route renders: it belongs into this test"


def _paths_with(field: str, api: Any) -> Iterator[str]:
    document = api.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        if body is not None:
            name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
            if field in document["components"]["schemas"][name]["properties"]:
                yield path


def test_s33_keyword_arguments_cannot_take_the_gate_s_place(api: Any) -> None:
    plain = api.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json()["tokens"]
    for name in (
        "chat_template",
        "tokenize",
        "tools",
        "add_generation_prompt",
        "messages",
        "raise_exception",
        "bos_token",
    ):
        kwargs = {name: "{{ 1 }}"}
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": kwargs}
        assert api.post("/tokenize", body).json()["tokens"] == plain


# S-38.


def test_s38_header_block(api: Any, live: Callable[..., Any]) -> None:
    reply = api.get("/health", headers={"x-long": "a" * 70_000})
    assert reply.status_code == 431 and reply.json()["error"]["code"] == "headers_too_large"
    many = "".join(f"X-{number}: {'b' * 50}\r\n" for number in range(4000))
    answer = live().raw(f"GET /health HTTP/1.1\r\nHost: localhost\r\n{many}\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 431")


def test_s38_body_is_capped_while_it_arrives(live: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that never end: the answer comes once the cap is passed, and no more than that is held."""
    monkeypatch.setattr("hotswap.server.guard.LINGER_SECONDS", 0.2)
    server = live(max_request_bytes=50_000)
    with server.connect() as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        sent = 0
        connection.settimeout(0.001)
        answer = b""
        while not answer and sent < 5_000_000:
            chunk = b"x" * 1000
            connection.settimeout(5)
            connection.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            sent += len(chunk)
            connection.settimeout(0.001)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                answer = connection.recv(4096)
        connection.settimeout(5)
        while chunk := connection.recv(4096):
            answer += chunk
        assert answer.startswith(b"HTTP/1.1 413") and b"request_too_large" in answer
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_s38_many_tiny_chunks(live: Callable[..., Any]) -> None:
    server = live()
    text = json.dumps({"prompt": "a" * 20_000, "truncate_prompt_tokens": 4, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text)
    answer = server.raw(head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]


# S-40, S-41.


@every_way
def test_s40_alternatives_are_bounded(api: Any, make_api: Callable[..., Any], stream: bool) -> None:
    for wanted in (21, 10**6, 2**31):
        refused(api.complete(logprobs=wanted, stream=stream), "logprobs")
        refused(api.chat(logprobs=True, top_logprobs=wanted, stream=stream), "top_logprobs")
        if not stream:
            refused(api.complete(prompt_logprobs=wanted), "prompt_logprobs")
            refused(api.chat(prompt_logprobs=wanted), "prompt_logprobs")
    assert api.complete(logprobs=20, max_tokens=1, stream=stream).status_code == 200
    small = make_api(engine_settings={"max_logprobs": 2})
    refused(small.chat(logprobs=True, top_logprobs=3, stream=stream), "top_logprobs")


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": 10**6},
        {"prompt_logprobs": 10**6},
        {"stop_token_ids": [320]},
        {"allowed_token_ids": [10**6]},
        {"logit_bias": {320: 1.0}},
        {"bad_words_token_ids": [[400]]},
    ],
)
def test_s40_the_engine_checks_again(change: dict[str, Any]) -> None:
    """As if a front end had forgotten to: the request ends with an error, and nothing is raised into the loop."""
    core = EngineCore.__new__(EngineCore)
    core._logits_width = 320
    sampling = SamplingParams(max_tokens=1).clone(**change)
    update = core.add_request(EngineRequest(1, [80], sampling, 0.0))
    assert update is not None and update.finish_reason == "error" and update.error_status == 400
    assert update.error_param == ("bad_words" if "bad_words_token_ids" in change else next(iter(change)))


@pytest.mark.parametrize("token_id", [-1, 320, 2**32 + 80, 2**70, 1.5, "a", None])
def test_s39_the_engine_checks_prompts(token_id: Any) -> None:
    """Offline nobody else does: `LLM` leaves it to the engine in its process."""
    core = EngineCore.__new__(EngineCore)
    core._logits_width = 320
    update = core.add_request(EngineRequest(1, [80, token_id], SamplingParams(max_tokens=1), 0.0))
    assert update is not None and update.finish_reason == "error" and update.error_status == 400
    assert update.error_param == "prompt"


@every_route
def test_s41_min_tokens_against_the_filled_in_maximum(make_api: Callable[..., Any], route: str) -> None:
    api = make_api(FakeEngine(lambda prompt, choice: [80] * 100, max_model_len=64))
    for fields in (
        {"min_tokens": 5, "max_tokens": 4},
        {"min_tokens": 64},
        {"min_tokens": 2**31 - 1},
        {"min_tokens": 100, "max_tokens": None},
        {"min_tokens": 100, "max_tokens": 100},
    ):
        for stream in (False, True):
            assert "min_tokens" in refused(ask(api, route, stream=stream, **fields), "min_tokens")
    capped = make_api(FakeEngine(max_tokens_ceiling=3))
    refused(ask(capped, route, min_tokens=4), "min_tokens")
    still_works(api)


def test_s41_health_tells_of_a_dead_receiver() -> None:
    """The task that receives from the engine ends for whatever reason: the server is not healthy, and says why."""

    async def run() -> tuple[str | None, str | None, str | None]:
        async def ends() -> None:
            return

        client = EngineClient.__new__(EngineClient)
        client._death, client._connected = None, True
        client._watcher, client._last_message = None, time.monotonic()
        client._heartbeat = cast(Any, SimpleNamespace(dead_threads=[], stalled_seconds=0.0))
        client._config = cast(Any, SimpleNamespace(engine_stuck_timeout=60.0))
        alive = asyncio.create_task(asyncio.sleep(60))
        client._tasks = cast(Any, [alive])
        healthy = client.health()
        client._tasks = [asyncio.create_task(ends())]
        await asyncio.sleep(0.01)
        dead = client.health()
        client._tasks = cast(Any, [alive])
        client._last_message -= 1000
        silent = client.health()
        alive.cancel()
        return healthy, dead, silent

    healthy, dead, silent = asyncio.run(run())
    assert healthy is None
    assert dead is not None and "background task" in dead
    assert silent is not None and "stuck" in silent


def test_s41_an_unhealthy_engine_is_503_on_every_route(api: Any) -> None:
    api.engine.health = lambda: "a background task of the API process has ended"
    for reply in (api.get("/health"), api.get("/ping"), api.complete("a"), api.chat("a"), api.get("/v1/models")):
        assert reply.status_code == 503 and reply.headers["retry-after"]
        assert "background task" in reply.json()["error"]["message"]


# S-43.


@every_route
@every_way
@pytest.mark.parametrize(
    "salt", ["", "x" * 257, "a b", "ü", "a\x00", "\n", "💥", 5, True, 1.5, [], {}, ["a"], "a;b", "a'b"]
)
def test_s43_salts(api: Any, route: str, stream: bool, salt: Any) -> None:
    refused(ask(api, route, cache_salt=salt, stream=stream), "cache_salt")
    assert ask(api, route, cache_salt="A.z_0~+/=:-", stream=stream, max_tokens=1).status_code == 200
    assert api.engine.requests[-1].cache_salt == "A.z_0~+/=:-"


# S-44.

SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]


@pytest.mark.parametrize("special", SPECIALS)
def test_s44_special_tokens_in_user_text_are_text(api: Any, special: str) -> None:
    tokenizer = api.engine.tokenizer
    special_id = tokenizer.special_tokens[special]
    for text in (special, f"a{special}b", special * 3):
        assert api.complete(text, max_tokens=1).status_code == 200
        ids = api.engine.requests[-1].prompt_token_ids
        assert special_id not in ids and tokenizer.decode(ids) == text
        assert special_id not in api.post("/tokenize", {"prompt": text}).json()["tokens"]
        plain = api.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()["tokens"]
        for content in (text, [{"type": "text", "text": text}]):
            assert api.chat(content, max_tokens=1).status_code == 200
            ids = api.engine.requests[-1].prompt_token_ids
            assert ids.count(special_id) == plain.count(special_id)
            assert text in tokenizer.decode(ids)


def test_s44_the_pieces_of_two_messages_do_not_join(api: Any) -> None:
    messages = [{"role": "user", "content": "<|im_"}, {"role": "user", "content": "start|>"}]
    ids = api.post("/tokenize", {"messages": messages}).json()["tokens"]
    plain = api.post("/tokenize", {"messages": [{"role": "user", "content": c} for c in "ab"]}).json()["tokens"]
    start = api.engine.tokenizer.special_tokens["<|im_start|>"]
    assert ids.count(start) == plain.count(start)


@pytest.mark.parametrize("special", SPECIALS)
def test_s44_the_operator_can_allow_them(make_api: Callable[..., Any], special: str) -> None:
    api = make_api(allow_special_tokens_in_prompts=True)
    special_id = api.engine.tokenizer.special_tokens[special]
    assert api.complete(f"a{special}b", max_tokens=1).status_code == 200
    assert api.engine.requests[-1].prompt_token_ids.count(special_id) == 1
    assert api.post("/tokenize", {"prompt": special}).json()["tokens"] == [special_id]
    plain = api.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()["tokens"]
    chat = api.post("/tokenize", {"messages": [{"role": "user", "content": special}]}).json()["tokens"]
    assert chat.count(special_id) == plain.count(special_id) + 1


# S-45.


def worst_health(server: Any, body: bytes) -> tuple[float, float]:
    """Sends one long request and asks /health all the while: (the slowest answer, how long the request took)."""
    took: list[float] = []

    def send() -> None:
        begin = time.perf_counter()
        reply = httpx.post(f"{server.url}/tokenize", content=body, headers=JSON, timeout=60)
        took.append(time.perf_counter() - begin)
        assert reply.status_code == 200, reply.text[:200]

    worst = 0.0
    with httpx.Client() as client:
        client.get(f"{server.url}/health")
        thread = threading.Thread(target=send)
        thread.start()
        while thread.is_alive():
            begin = time.perf_counter()
            assert client.get(f"{server.url}/health").status_code == 200
            worst = max(worst, time.perf_counter() - begin)
            time.sleep(0.002)
        thread.join()
    return worst, took[0]


def test_s45_a_megabyte_does_not_stop_the_others(live: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """100 ms, or an eighth of the request's own time on a machine that is busy with something else, in the best of three
    tries; and the control, in which the same work on the event loop is seen."""
    words = "the quick brown fox jumps over the lazy dog and runs through thick winter nights. "
    body = json.dumps({"prompt": (words * 13_000)[:1_000_000]}).encode()
    server = live(FakeEngine(max_model_len=4096))
    tries: list[tuple[float, float]] = []
    while len(tries) < 3 and not any(worst < max(0.1, took / 8) for worst, took in tries):
        tries.append(worst_health(server, body))
    assert any(worst < max(0.1, took / 8) for worst, took in tries), tries

    async def at_once(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return work(*arguments, **options)

    monkeypatch.setattr("hotswap.server.openai.prompts.asyncio.to_thread", at_once)
    blocked, took = worst_health(server, json.dumps({"prompt": words * 2500}).encode())
    assert blocked > took / 3, (blocked, took)


@every_route
def test_s45_what_cannot_fit_is_refused_before_it_is_tokenized(
    make_api: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    api = make_api(FakeEngine(max_model_len=64))

    def never(*_: Any, **__: Any) -> Any:
        raise RuntimeError("tokenized")

    for name in ("encode", "encode_chat", "encode_batch"):
        monkeypatch.setattr(type(api.engine.tokenizer), name, never)
    long = "a" * (64 * 512 + 1)
    reply = api.complete(long) if route == "completions" else api.chat(long)
    assert reply.json()["error"]["code"] == "context_length_exceeded"


# S-46.

INTEGERS = {
    "completions": [
        *("n", "top_k", "seed", "max_tokens", "max_completion_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
        *("truncate_prompt_tokens", "priority", "stop_token_ids[]", "allowed_token_ids[]", "prompt[]", "prompt[][]"),
    ],
    "chat": [
        *("n", "top_k", "seed", "max_tokens", "max_completion_tokens", "min_tokens", "top_logprobs", "prompt_logprobs"),
        *("truncate_prompt_tokens", "priority", "stop_token_ids[]", "allowed_token_ids[]"),
    ],
}
NO_INTEGERS = ["true", "false", "1.0", "1.5", '"1"', "1e2", "NaN", "Infinity", "-Infinity", "{}", "1e400"]
OUT_OF_RANGE = [str(2**63), str(-(2**63) - 1), "1" + "0" * 40, "-" + "9" * 400]


def integer_cases() -> list[tuple[str, str]]:
    return [(route, name) for route, names in INTEGERS.items() for name in names]


def with_raw(route: str, name: str, raw: str) -> bytes:
    field = name.replace("[]", "")
    value = raw
    for _ in range(name.count("[]")):
        value = f"[{value}]"
    parts = ['"prompt":"a"'] if route == "completions" else ['"messages":[{"role":"user","content":"a"}]']
    if field == "prompt":
        parts = []
    if field == "top_logprobs":
        parts.append('"logprobs":true')
    return ("{" + ",".join([*parts, f'"{field}":{value}']) + "}").encode()


@pytest.mark.parametrize(("route", "name"), integer_cases())
def test_s46_integers(api: Any, route: str, name: str) -> None:
    path = "/v1/completions" if route == "completions" else "/v1/chat/completions"
    for raw in [*NO_INTEGERS, *OUT_OF_RANGE]:
        if name == "prompt[]" and raw == '"1"':
            continue  # a list of texts
        reply = api.call("POST", path, content=with_raw(route, name, raw), headers=JSON)
        assert reply.status_code == 400, (name, raw, reply.text)
    if name not in ("seed", "top_k", "priority"):
        assert api.call("POST", path, content=with_raw(route, name, "-1"), headers=JSON).status_code == 400
    still_works(api)


def test_s46_every_integer_field_is_in_the_test(api: Any) -> None:
    schemas = api.get("/openapi.json").json()["components"]["schemas"]
    for route, model in (("completions", "CompletionRequest"), ("chat", "ChatRequest")):
        fields = {
            name
            for name, schema in schemas[model]["properties"].items()
            if '"integer"' in json.dumps(schema) and not schema.get("description", "").startswith(("Accepted", "Not"))
        }
        assert fields == {name.replace("[]", "") for name in INTEGERS[route]}


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e400", "true", '"0.5"', "[]", "1e7", "-1e7"])
def test_s46_numbers(api: Any, raw: str) -> None:
    names = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
    for name in names:
        for route, path in (("completions", "/v1/completions"), ("chat", "/v1/chat/completions")):
            reply = api.call("POST", path, content=with_raw(route, name, raw), headers=JSON)
            assert reply.status_code == 400, (name, raw, reply.text)
    body = f'{{"prompt":"a","logit_bias":{{"80":{raw}}}}}'.encode()
    assert api.call("POST", "/v1/completions", content=body, headers=JSON).status_code == 400
    assert api.call("POST", "/detokenize", content=f'{{"tokens":[{raw}]}}'.encode(), headers=JSON).status_code == 400


# S-47.

STRINGS = [
    ("/v1/completions", '{"prompt":"%s"}'),
    ("/v1/completions", '{"prompt":["a","%s"]}'),
    ("/v1/completions", '{"prompt":"a","stop":"%s"}'),
    ("/v1/completions", '{"prompt":"a","stop":["x","%s"]}'),
    ("/v1/completions", '{"prompt":"a","bad_words":["%s"]}'),
    ("/v1/completions", '{"prompt":"a","user":"%s"}'),
    ("/v1/completions", '{"prompt":"a","model":"%s"}'),
    ("/v1/completions", '{"prompt":"a","cache_salt":"%s"}'),
    ("/v1/completions", '{"prompt":"a","request_id":"%s"}'),
    ("/v1/completions", '{"prompt":"a","suffix":"%s"}'),
    ("/v1/completions", '{"prompt":"a","logit_bias":{"%s":1}}'),
    ("/v1/completions", '{"prompt":"a","logits_processors":["%s"]}'),
    ("/v1/completions", '{"prompt":"a","%s":1}'),
    ("/v1/completions", '{"prompt":"a","metadata":{"%s":"%s"}}'),
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":"%s"}]}'),
    ("/v1/chat/completions", '{"messages":[{"role":"%s","content":"a"}]}'),
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":[{"type":"text","text":"%s"}]}]}'),
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a","name":"%s"}]}'),
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"x":"%s"}}'),
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a"}],"documents":[{"title":"%s"}]}'),
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a"}],"tools":[{"function":{"name":"%s"}}]}'),
    ("/tokenize", '{"prompt":"%s"}'),
]


@pytest.mark.parametrize(("path", "body"), STRINGS)
def test_s47_lone_surrogates(api: Any, path: str, body: str) -> None:
    for text in ("\\ud83d", "\\ude00\\ud83d", "ok\\udc00", "\\uD83D\\u0041"):
        reply = api.call("POST", path, content=body.replace("%s", text).encode(), headers=JSON)
        refused(reply)
    raw = body.replace("%s", "X").encode()
    for data in (b"\xff", b"\xc0\xaf", b"\xed\xa0\xbd", b"\xf0\x9f"):  # no UTF-8: overlong, a surrogate, cut short
        refused(api.call("POST", path, content=raw.replace(b"X", data, 1), headers=JSON))
    assert api.call("POST", path, content=raw, headers=JSON).status_code in (200, 400, 404)


def test_s47_pairs_are_fine(api: Any) -> None:
    body = b'{"prompt":"\\ud83d\\ude00 \xf0\x9f\x98\x80","max_tokens":1,"echo":true}'
    reply = api.call("POST", "/v1/completions", content=body, headers=JSON)
    assert reply.status_code == 200 and "\U0001f600 \U0001f600" in reply.json()["choices"][0]["text"]


# S-48.


@pytest.mark.parametrize(
    ("depth", "opening", "closing"),
    [
        *((depth, "[", "]") for depth in (129, 10**3, 10**4, 10**5, 10**6)),
        *((depth, '{"a":', "}") for depth in (129, 10**3, 10**5)),
        *((depth, '[{"a":', "}]") for depth in (65, 10**4)),
    ],
)
def test_s48_nesting(api: Any, depth: int, opening: str, closing: str) -> None:
    for inner in (f"{opening * depth}1{closing * depth}", opening * depth):
        body = f'{{"prompt":"a","metadata":{inner}}}'.encode()
        message = refused(api.call("POST", "/v1/completions", content=body, headers=JSON))
        assert "nested" in message or "objects and lists" in message or "valid JSON" in message
    still_works(api)


def test_s48_the_deepest_that_passes(api: Any) -> None:
    body = f'{{"prompt":"a","max_tokens":1,"metadata":{"[" * 127}1{"]" * 127}}}'.encode()
    assert api.call("POST", "/v1/completions", content=body, headers=JSON).status_code == 200
    text = json.dumps({"prompt": "[" * 5000, "truncate_prompt_tokens": 5, "max_tokens": 1}).encode()
    assert api.call("POST", "/v1/completions", content=text, headers=JSON).status_code == 200, (
        "brackets in a text nest nothing"
    )


def test_a_front_end_s_own_limits_hold_without_a_server() -> None:
    """S-40 and S-43 are the engine's front end's, so that every front end has them."""
    inputs = InputProcessor(FakeEngine().info, None, (3,), SystemClock(), InputLimits())
    for params, salt in ((SamplingParams(logprobs=21), None), (SamplingParams(), "a b"), (SamplingParams(), "")):
        with pytest.raises(RequestError):
            inputs.process([80], params, cache_salt=salt)


def test_sockets_are_closed(live: Callable[..., Any]) -> None:
    """The tests above leave nothing behind."""
    server = live()
    with socket.create_connection(("127.0.0.1", server.port), timeout=5):
        pass
    assert httpx.get(f"{server.url}/health").status_code == 200
