"""Readers that do not read, bodies that do not come, and requests on their way when the server is told to stop."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.server.app import create_app
from hotswap.server.state import ServerState

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def talkative(step_seconds: float = 0.0) -> FakeEngine:
    """Says more than the buffers between server and client hold."""
    return FakeEngine(lambda prompt, choice: [68] * 200_000, max_model_len=400_000, step_seconds=step_seconds)


def stalled(server: Any, body: dict[str, Any]) -> socket.socket:
    """A client that sends a request and then takes nothing; its receive buffer is as small as the kernel lets it be."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", server.port))
    data = json.dumps(body).encode()
    connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return connection


LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 200_000, "stream": True, "logprobs": 5, "return_token_ids": True}


def test_c03_a_reader_that_takes_nothing_is_cut_off(
    live: Callable[..., Any], eventually: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    server = live(talkative(), max_stream_backlog_seconds=0.5)
    connections = [stalled(server, LONG) for _ in range(3)]
    eventually(lambda: server.engine.stats.num_running == 3)
    begin = time.monotonic()
    eventually(lambda: server.engine.stats.num_running == 0 and server.state.num_calls == 0, 15.0)
    assert time.monotonic() - begin < 12
    assert len(server.engine.aborted) == 3 and not server.engine.finished
    assert caplog.text.count("takes nothing") == 3
    # The connection is gone, whether or not its reader ever comes back.
    eventually(lambda: not server.server.server_state.connections, 2.0)
    for connection in connections:
        with connection, pytest.raises((ConnectionError, TimeoutError)):
            while connection.recv(1 << 20):
                pass
            raise ConnectionResetError  # closed without the end mark
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_c03_what_waits_for_it_is_bounded(live: Callable[..., Any], eventually: Callable[..., None]) -> None:
    """Only what came within the limit is held, and not until the answer's end."""
    server = live(talkative(0.001), max_stream_backlog_seconds=0.5)
    connection = stalled(server, LONG)
    eventually(lambda: server.engine.stats.num_running == 1)
    most = 0
    end = time.monotonic() + 15
    while server.engine.stats.num_running and time.monotonic() < end:
        for stream in list(server.engine._streams.values()):
            pending = stream._pending
            if pending is not None:
                most = max(most, sum(len(choice.token_ids) for choice in pending.outputs))
        time.sleep(0.005)
    connection.close()
    assert server.engine.stats.num_running == 0
    assert most < 5000, "what a second brings is a few hundred tokens"


def test_c03_a_neighbour_and_a_slow_reader_are_served(
    live: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    server = live(talkative(0.001), max_stream_backlog_seconds=1.0)
    stuck = stalled(server, LONG)
    slow = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 600, "stream": True})
    received = b""
    while b"[DONE]" not in received:
        received += slow.recv(2000)
        time.sleep(0.01)
    assert received.count(b'"text"') > 5 and b'"finish_reason":"length"' in received
    slow.close()
    body = {"prompt": "a", "max_tokens": 5}
    assert httpx.post(f"{server.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
    stuck.close()
    eventually(lambda: server.engine.stats.num_running == 0)


# Answers that come before the body.


@pytest.mark.parametrize(
    ("settings", "head", "status"),
    [
        ({"api_key": ["k"]}, HEAD, b"401"),
        ({}, HEAD.replace(b"/v1/completions", b"/nope"), b"404"),
        ({}, HEAD.replace(b"POST", b"PUT"), b"405"),
        ({}, HEAD.replace(b"application/json", b"text/plain"), b"415"),
        ({}, HEAD.replace(b"localhost", b"evil.example"), b"400"),
    ],
)
@pytest.mark.parametrize("framing", [b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_an_early_refusal_does_not_wait_for_a_trickling_body(
    live: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    head: bytes,
    status: bytes,
    framing: bytes,
) -> None:
    monkeypatch.setattr("hotswap.server.guard.LINGER_SECONDS", 0.3)
    server = live(**settings)
    with server.connect() as connection:
        connection.sendall(head + framing)
        received = b""
        begin = time.monotonic()
        connection.settimeout(0.05)
        closed = False
        while not closed and time.monotonic() - begin < 5:
            try:
                connection.sendall(b"1\r\nx\r\n" if b"chunked" in framing else b"x")
                chunk = connection.recv(4096)
                received += chunk
                closed = not chunk
            except TimeoutError:
                continue
            except ConnectionError:
                closed = True
        assert closed, "the connection is still held"
        assert received.startswith(b"HTTP/1.1 " + status) and b"connection: close" in received.lower()
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert httpx.get(f"{server.url}/version").status_code == 200


def test_an_early_refusal_keeps_a_connection_whose_request_is_complete(live: Callable[..., Any]) -> None:
    server = live(api_key=["k"])
    one = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    reply = server.raw(one + one + last)
    assert reply.count(b"HTTP/1.1 401") == 2 and reply.count(b"HTTP/1.1 200") == 1


def test_expect_continue_and_an_early_refusal(live: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotswap.server.guard.LINGER_SECONDS", 0.3)
    reply = live(api_key=["k"]).raw(HEAD + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 401") and b"100 Continue" not in reply


# Draining.


def test_a_request_that_is_being_prepared_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of its body and its place in the engine: a long prompt is tokenized there."""

    async def run() -> None:
        engine = FakeEngine(max_model_len=4096)
        state = ServerState(ServerConfig(), EngineConfig.from_flat(model="tiny"), engine)
        app = create_app(state)
        tokenizing, go_on = asyncio.Event(), asyncio.Event()

        async def slow(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            tokenizing.set()
            await go_on.wait()
            return work(*arguments, **options)

        monkeypatch.setattr("hotswap.server.openai.prompts.asyncio.to_thread", slow)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for stream in (False, True):
                tokenizing.clear()
                go_on.clear()
                body = {"prompt": "a b " * 1500, "max_tokens": 1, "stream": stream, "truncate_prompt_tokens": 5}
                call = asyncio.create_task(client.post("/v1/completions", json=body))
                await tokenizing.wait()
                assert state.num_calls == 1
                assert not await state.wait_idle(0.05)
                go_on.set()
                assert (await call).status_code == 200
                assert state.num_calls == 0 and await state.wait_idle(0.05)

    asyncio.run(run())


def test_a_body_that_trickles_is_not_waited_for(live: Callable[..., Any], eventually: Callable[..., None]) -> None:
    server = live()
    with server.connect() as connection:
        connection.sendall(HEAD + b'Content-Length: 100\r\n\r\n{"prompt":')
        time.sleep(0.2)
        assert server.state.num_calls == 0
    refused = [httpx.post(f"{server.url}/v1/completions", json={"n": 0, "prompt": "a"}) for _ in range(3)]
    assert {reply.status_code for reply in refused} == {400}
    eventually(lambda: server.state.num_calls == 0)
