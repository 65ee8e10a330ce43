"""Clients that behave badly: they leave, they are slow, they speak no HTTP, they send too much."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from hotswap.core.testing.fake_engine import FakeEngine

Eventually = Callable[..., None]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LONG = {"prompt": "hello", "max_tokens": 200}


def long_engine(step_seconds: float = 0.01) -> FakeEngine:
    return FakeEngine(lambda prompt, choice: [80] * 250, step_seconds=step_seconds)


def metric(server: Any, name: str) -> float:
    lines = [
        line for line in httpx.get(f"{server.url}/metrics").text.splitlines() if line.startswith(f"hotswap:{name}")
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_ends_its_work(
    live: Callable[..., Any], eventually: Eventually, stream: bool, n: int
) -> None:
    server = live(long_engine())
    connection = server.ask("/v1/completions", {**LONG, "stream": stream, "n": n})
    eventually(lambda: server.engine.stats.num_running == n)
    if stream:
        assert connection.recv(64)
    begin = time.monotonic()
    connection.close()
    eventually(lambda: server.engine.stats.num_running == 0, 1.0)
    assert time.monotonic() - begin < 1.0
    eventually(lambda: server.state.num_calls == 0)
    assert len(server.engine.aborted) == n
    assert metric(server, 'request_success_total{engine="0",finished_reason="abort"') == n


def test_a_client_that_leaves_while_it_waits(live: Callable[..., Any], eventually: Eventually) -> None:
    """Before the first token, for both kinds of answer, and for a list of prompts."""
    server = live(long_engine())
    server.engine.gate.clear()
    bodies = [
        LONG,
        {**LONG, "stream": True},
        {**LONG, "prompt": ["a", "b"]},
        {**LONG, "prompt": ["a", "b"], "stream": True},
    ]
    connections = [server.ask("/v1/completions", body) for body in bodies]
    eventually(lambda: server.engine.stats.num_running == 6)
    for connection in connections:
        connection.close()
    eventually(lambda: server.engine.stats.num_running == 0, 1.0)
    assert len(server.engine.aborted) == 6


def test_many_that_leave(live: Callable[..., Any], eventually: Eventually) -> None:
    server = live(long_engine())
    for _ in range(10):
        connections = [server.ask("/v1/chat/completions", chat_body(stream=k % 2 == 0)) for k in range(10)]
        time.sleep(0.02)
        for connection in connections:
            connection.close()
    eventually(lambda: server.engine.stats.num_running == 0 and server.state.num_calls == 0)
    assert not server.engine.finished
    server.engine._script = lambda prompt, choice: [80]
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 200


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100, **fields}


def test_a_neighbour_is_not_disturbed(live: Callable[..., Any]) -> None:
    server = live(FakeEngine(lambda prompt, choice: prompt[::-1] * 5, step_seconds=0.005))
    with httpx.stream("POST", f"{server.url}/v1/completions", json={"prompt": "abc", "stream": True}) as reply:
        others = [server.ask("/v1/completions", {**LONG, "stream": True}) for _ in range(5)]
        for other in others:
            other.close()
        lines = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert "".join(line["choices"][0]["text"] for line in lines) == "cba" * 5


def test_a_slow_reader_loses_nothing(live: Callable[..., Any], eventually: Eventually) -> None:
    """A reader that pauses while the engine runs ahead gets every token once, in order."""
    tokens = [80 + k % 20 for k in range(2000)]
    server = live(FakeEngine(lambda prompt, choice: tokens, max_model_len=4096))
    body = {"prompt": "a", "max_tokens": 2000, "stream": True, "logprobs": 5, "return_token_ids": True}
    connection = server.ask("/v1/completions", body)
    eventually(lambda: server.engine.stats.num_running == 0 or server.state.num_calls == 1)
    time.sleep(0.5)
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(4096)
    connection.close()
    events = [json.loads(part[6:]) for part in dechunk(received).split(b"\n\n") if part.startswith(b"data: {")]
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == tokens
    assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events) == 2000


def dechunk(response: bytes) -> bytes:
    body = response.partition(b"\r\n\r\n")[2]
    joined = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        joined += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    return joined


def test_engine_death_ends_streams_with_a_word(live: Callable[..., Any], eventually: Eventually) -> None:
    server = live(long_engine())
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.engine.die("the engine process was killed by SIGKILL")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert "SIGKILL" in json.loads(rest[-2][6:])["error"]["message"]
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503 and "SIGKILL" in health.json()["error"]["message"]


def test_what_is_no_http(live: Callable[..., Any]) -> None:
    server = live()
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"\r\n" * 5 + b"x\r\n\r\n",
    ):
        reply = server.raw(data)
        assert reply.startswith(b"HTTP/1.1 400"), reply
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    huge = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"a" * 300_000
    reply = server.raw(huge)
    assert reply.startswith(b"HTTP/1.1 431"), reply[:200]
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_paths_are_matched_as_sent(live: Callable[..., Any]) -> None:
    server = live(api_key=["secret"])
    for path in ("/v1/../health", "//health", "/health/", "/health%00", "/./health", "/health;x", "*"):
        reply = server.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert reply.startswith(b"HTTP/1.1 401"), (path, reply[:60])
    # A query does not belong to the path, and an absolute target is only matched by what follows the host.
    assert server.raw(b"GET /health?x=/v1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 200"
    )
    upgrade = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert server.raw(upgrade).startswith(b"HTTP/1.1 401")


def test_too_much_body(live: Callable[..., Any]) -> None:
    server = live(max_request_bytes=100_000)
    reply = httpx.post(
        f"{server.url}/v1/completions", content=b"x" * 3_000_000, headers={"content-type": "application/json"}
    )
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "request_too_large"

    reply_bytes = server.raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"3e8\r\n" + b"x" * 1000 + b"\r\n") * 150)
    assert reply_bytes.startswith(b"HTTP/1.1 413")
    lie = HEAD + b"Content-Length: 99999999999\r\n\r\n"
    begin = time.monotonic()
    assert server.raw(lie).startswith(b"HTTP/1.1 413")
    assert time.monotonic() - begin < 5


def test_expect_continue_and_tiny_chunks(live: Callable[..., Any]) -> None:
    server = live()
    body = b'{"prompt":"ab"}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in body) + b"0\r\n\r\n"
    assert b'"text":"ba"' in server.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    reply = server.raw(head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert b'"text":"ba"' in reply


def test_keep_alive_and_pipelining(live: Callable[..., Any]) -> None:
    server = live()
    one = HEAD + b'Content-Length: 15\r\n\r\n{"prompt":"ab"}'
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    reply = server.raw(one + one + last)
    assert reply.count(b"HTTP/1.1 200") == 3 and reply.count(b'"text":"ba"') == 2


def test_slow_headers_are_cut_off(live: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotswap.server.http_server.HEADER_SECONDS", 0.3)
    server = live()
    with server.connect() as connection:
        connection.settimeout(5)
        begin = time.monotonic()
        for byte in b"GET /hea":
            connection.send(bytes([byte]))
            time.sleep(0.02)
        assert connection.recv(100) == b""
        assert 0.2 < time.monotonic() - begin < 3
    # A request that is being answered is not cut off by it.
    server.engine._step_seconds = 0.1
    assert (
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "abcdef"}, timeout=10).json()["choices"][0]["text"]
        == "fedcba"
    )
