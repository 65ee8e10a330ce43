"""Bug bank, group N: aborts and clients that leave."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from hotswap.core.testing.fake_engine import FakeEngine

ROUTES = ("/v1/completions", "/v1/chat/completions")
Eventually = Callable[[Callable[[], bool], float], None]
SYNC = pytest.mark.parametrize("async_scheduling", [True, False])


# N01


def long_body(number: int, stream: bool) -> tuple[str, dict[str, Any]]:
    """A call that would take seconds, in one of several forms."""
    common: dict[str, Any] = {"max_tokens": 700, "temperature": 0, "stream": stream, "n": 1 + number % 2}
    if number % 3 == 0:
        return ROUTES[1], {"messages": [{"role": "user", "content": "L"}], "logprobs": number % 4 == 0, **common}
    prompt = ["L", "L"] if number % 5 == 0 else "L"
    return ROUTES[0], {"prompt": prompt, **common}


def leave(connection: socket.socket, rudely: bool) -> None:
    """Closes in good order, or with a reset."""
    if rudely:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize(
    "stage", ["before the first token", "in the middle", "whole answer", "queued", "half a request"]
)
def test_n01_a_hundred_clients_that_leave_are_forgotten_at_once(
    served: Any, eventually: Eventually, stage: str
) -> None:
    """20 at each of five stages, both routes, n 1 and 2, lists of prompts, closed in order and by reset: within a second
    nothing runs, waits or holds blocks, and the next request is served as fast as ever."""
    eventually(served.is_idle, 5.0)
    stream = stage != "whole answer"
    connections = []
    if stage == "queued":
        connections += [served.ask(ROUTES[0], {"prompt": "L", "max_tokens": 900, "stream": True}) for _ in range(8)]
        eventually(lambda: served.metrics()["num_requests_running", ""] == 8, 5.0)
    for number in range(20):
        path, body = long_body(number, stream)
        if stage == "half a request":
            data = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection = socket.create_connection(("127.0.0.1", served.port), timeout=20)
            connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data[: number * 3])
        else:
            connection = served.ask(path, body)
        connections.append(connection)
        if stage == "in the middle":
            assert connection.recv(64)
        if stage in ("before the first token", "in the middle") and number % 4 == 3:
            while connections:  # leave in groups, so that the next ones find seats
                leave(connections.pop(), rudely=number % 8 == 3)
    if stage == "queued":
        eventually(lambda: served.metrics()["num_requests_waiting", ""] > 10, 5.0)
    elif stage == "whole answer":
        eventually(lambda: served.metrics()["num_requests_running", ""] > 0, 5.0)
    for number, connection in enumerate(connections):
        leave(connection, rudely=number % 2 == 0)
    eventually(served.is_idle, 1.0)
    began = time.monotonic()
    assert served.complete("H", temperature=0).json()["choices"][0]["text"] == "hello"
    assert time.monotonic() - began < 1.0


# N02


@SYNC
def test_n02_aborts_in_the_queue_leave_nothing_behind(
    make_tiny: Callable[..., Any], drive: Callable[..., Any], async_scheduling: bool
) -> None:
    """50 queued behind two seats, 25 of them aborted while they wait: the others are served, every map is empty."""
    llm = make_tiny(max_num_seqs=2, num_gpu_blocks_override=30, async_scheduling=async_scheduling)
    driver = drive(llm)
    ids = [driver.add([5 + n, 6, 7, 8, 9], max_tokens=4, ignore_eos=True)[0] for n in range(50)]
    for _ in range(3):
        driver.step()
    gone = random.Random(2).sample(ids[2:], 25)
    driver.abort(*gone)
    driver.abort(*gone, 10**6)  # again, and one that never was
    driver.drain()
    state = driver.core.mechanism._state
    assert not state.requests and not len(state.policy) and not state.leaving and not state.prefilling
    assert state.num_queued == state.num_waiting_for == len(state.running) == 0
    for request_id in ids:
        if request_id in gone:
            assert driver.ends[request_id] == ["abort"] and driver.tokens[request_id] == []
        else:
            assert driver.ends[request_id] == ["length"] and len(driver.tokens[request_id]) == 4
    (one,) = driver.add([5, 6, 7], max_tokens=3, ignore_eos=True)
    driver.drain()
    assert len(driver.tokens[one]) == 3


@pytest.mark.parametrize("where", ["header", "body", "both"])
def test_n02_two_live_requests_may_have_the_same_name(served: Any, where: str) -> None:
    """The client's label is a label: both are served, in full, and so is a third that comes after an abort of the name."""
    import httpx

    headers = {"x-request-id": "same"} if where != "body" else {}
    body = {"prompt": "L", "max_tokens": 60, "temperature": 0, **({"request_id": "same"} if where != "header" else {})}

    async def together() -> list[Any]:
        async with httpx.AsyncClient(base_url=served.url, timeout=30) as client:
            calls = [client.post("/v1/completions", json=body, headers=headers) for _ in range(4)]
            return await asyncio.gather(*calls)

    texts = {reply.json()["choices"][0]["text"] for reply in asyncio.run(together())}
    assert len(texts) == 1 and len(texts.pop()) == 60
    connection = served.ask("/v1/completions", {**body, "max_tokens": 900})
    connection.close()
    reply = served.client.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 60
    if headers:
        assert reply.headers["x-request-id"] == "same"


def test_n02_the_front_end_forgets_too(make_api: Callable[..., Any]) -> None:
    """Over the application: calls cancelled while the engine is held leave no state in the router of outputs."""
    api = make_api(FakeEngine(step_seconds=0.001))

    async def run() -> None:
        api.engine.gate.clear()
        tasks = []
        for number in range(50):
            body = {"prompt": "abc", "n": 1 + number % 2, "request_id": "same", "stream": number % 3 == 0}
            tasks.append(asyncio.create_task(api._client.post("/v1/completions", json=body)))
        await asyncio.sleep(0.1)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.sleep(0)
        api.engine.gate.set()
        replies = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(getattr(reply, "status_code", None) == 200 for reply in replies) == 25
        await asyncio.sleep(0.05)

    api.runner.run(run())
    assert len(api.engine._outputs) == 0 and not api.engine._streams and api.engine.stats.num_running == 0
    assert api.state.num_calls == 0


# N04


ENDINGS: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": 5, "ignore_eos": True},
    "end of sequence": {},
    "stop token": {"stop_token_ids": [84]},
    "two at once": {"n": 2, "max_tokens": 5},
    "prompt only": {"max_tokens": 0},
    "prompt scores": {"prompt_logprobs": 1, "logprobs": 1},
}


@SYNC
@pytest.mark.parametrize("ending", ENDINGS)
def test_n04_an_abort_racing_the_last_token_ends_a_request_once(
    make_llm: Callable[..., Any], drive: Callable[..., Any], ending: str, async_scheduling: bool
) -> None:
    """The abort is injected before every turn of the loop from the first to two after the last, beside a neighbour that
    must not notice: one terminal event, the tokens a beginning of the full answer, the pool whole."""
    llm = make_llm({"A": [80, 81, 82, 83, 84, 85], "B": [90] * 12}, async_scheduling=async_scheduling)
    fields = {"max_tokens": 12, **ENDINGS[ending]}
    prompt, neighbour = [36], [37]
    outcomes = set()
    for turn in itertools.count():
        driver = drive(llm)
        other = driver.add(neighbour, max_tokens=12, ignore_eos=True)
        ours = driver.add(prompt, **fields)
        for now in range(100):
            if now == turn:
                driver.abort(*ours)
                driver.abort(ours[0])
            if not driver.core.has_work():
                break
            driver.step()
        llm.check_integrity()
        driver.drain()
        assert driver.tokens[other[0]] == [90] * 12 and driver.ends[other[0]] == ["length"]
        for request_id in ours:
            (end,) = driver.ends[request_id]
            outcomes.add(end)
            said = driver.tokens[request_id]
            assert said == [80, 81, 82, 83, 84, 85, 3][: len(said)]
            if end != "abort":
                assert turn > 0
        if turn > 14:
            break
    assert outcomes == {"abort", "stop" if ending in ("end of sequence", "stop token", "prompt scores") else "length"}


@SYNC
def test_n04_while_the_prompt_is_in_chunks_and_under_pressure(
    make_tiny: Callable[..., Any], drive: Callable[..., Any], async_scheduling: bool
) -> None:
    """Random aborts at random turns over a pool that preempts, with shared prefixes: each ends once, nothing leaks."""
    llm = make_tiny(num_gpu_blocks_override=16, max_num_seqs=4, async_scheduling=async_scheduling)
    source = random.Random(4)
    for _ in range(12):
        driver = drive(llm)
        waiting = [
            driver.add(
                [5, 6, 7, 8, 9, 10, 11, 12, 13][: source.randrange(1, 10)], max_tokens=source.randrange(1, 20), n=2
            )
            for _ in range(6)
        ]
        ids = list(itertools.chain(*waiting))
        while driver.core.has_work():
            if source.random() < 0.2:
                driver.abort(*source.sample(ids, 2))
            driver.step()
            llm.check_integrity()
        driver.drain()
