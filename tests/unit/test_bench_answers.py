"""Answers as other servers send them: events cut anywhere, chunks that are odd but legal, failures of every kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from hotswap.core.errors import UsageError
from hotswap.server.bench.answers import read_event
from hotswap.server.bench.http_client import Server, ServerFacts, base_url, refusal_text
from hotswap.server.bench.http_target import HttpTarget, RequestOptions
from hotswap.server.bench.measure import RequestRecord
from hotswap.server.bench.prompts import Prompt
from hotswap.server.bench.sse import EventParser
from hotswap.server.bench.workload import PlannedRequest

# Server-sent events.

STREAM = 'data: {"a":1}\n\n: a comment\r\n\r\nevent: x\r\ndata:first\r\ndata: zweite Zeile ü😀\r\n\r\ndata: [DONE]\n\n'.encode()
EVENTS = ['{"a":1}', "first\nzweite Zeile ü😀", "[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_cut_anywhere(size: int) -> None:
    parser = EventParser()
    found = [event for i in range(0, len(STREAM), size) for event in parser.feed(STREAM[i : i + size])]
    assert found == EVENTS and parser.close() == []


def test_a_last_event_without_its_blank_line() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n\ndata: b") == ["a"]
    assert parser.close() == ["b"] and parser.close() == []


# Chunks.


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"text": "x"}, "x"),
        ({"text": None}, ""),
        ({"delta": {"content": "x"}}, "x"),
        ({"delta": {"role": "assistant", "content": None}}, ""),
        ({"delta": {"reasoning_content": "hm", "content": "x"}}, "hmx"),
        ({"delta": {"tool_calls": [{"function": {"arguments": "{}"}}, {"function": None}, 5]}}, "{}"),
        ({"message": {"content": "x"}}, "x"),
        ({"delta": 5}, ""),
        ({}, ""),
    ],
)
def test_text_of_a_choice(choice: dict[str, Any], text: str) -> None:
    assert read_event(json.dumps({"choices": [choice]})).text == text


@pytest.mark.parametrize("data", ["{", "[]", "5", "null", '"x"'])
def test_events_that_cannot_be_read_are_errors(data: str) -> None:
    assert read_event(data).error is not None


@pytest.mark.parametrize("error", [{"message": "why"}, "why"])
def test_error_events(error: Any) -> None:
    assert read_event(json.dumps({"error": error})).error == ("error event", "why")


def test_logprobs_of_both_endpoints() -> None:
    completion = {"logprobs": {"tokens": ["a", "b"], "token_logprobs": [None, -1.5]}}
    chat = {"logprobs": {"content": [{"token": "b", "logprob": -1.5}]}}
    for choice in (completion, chat):
        assert read_event(json.dumps({"choices": [choice]})).logprobs == [("b", -1.5)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"error":{"message":"a\\nb"}}', "a b"),
        (b'{"detail":"gone"}', "gone"),
        (b"<html>", "<html>"),
        (b"", "no reason given"),
        (b"[1]", "[1]"),
    ],
)
def test_refusals(content: bytes, text: str) -> None:
    assert refusal_text(content) == text


def test_addresses() -> None:
    assert base_url("localhost:80/v1/") == "http://localhost:80"
    assert base_url("https://h/prefix/v1") == "https://h/prefix"
    for url in ("ftp://h", "http://[::1", "http://"):
        with pytest.raises(UsageError, match="--url"):
            base_url(url)


# One request, against a server made of its pieces. The clock is the test's: each piece comes at a whole second.


class Pieces(httpx.AsyncByteStream):
    def __init__(self, clock: list[float], pieces: Sequence[bytes | Exception]) -> None:
        self._clock = clock
        self._pieces = pieces

    async def __aiter__(self) -> Any:
        for piece in self._pieces:
            self._clock[0] += 1
            if isinstance(piece, Exception):
                raise piece
            yield piece


def run(
    pieces: Sequence[bytes | Exception], status: int = 200, kind: str = "text/event-stream", **options: Any
) -> RequestRecord:
    clock = [0.0]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers={"content-type": kind}, stream=Pieces(clock, pieces))

    async def send() -> RequestRecord:
        async with Server("http://h") as server:
            await server.client.aclose()
            server.client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
            record = RequestRecord(0, 0.0)
            target = HttpTarget(server, ServerFacts("http://h", "m"), RequestOptions(**options))
            await target.send(PlannedRequest(0, 0.0, 7, 4), Prompt(text="x"), record, lambda: clock[0])
            return record

    return asyncio.run(send())


def chunk(
    text: str | None = None, *, usage: dict[str, Any] | None = None, finish: str | None = None, **more: Any
) -> bytes:
    choices = [] if text is None and finish is None else [{"index": 0, "text": text, "finish_reason": finish, **more}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_a_plain_stream() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    record = run([chunk("a"), chunk("b"), chunk("c", finish="length"), chunk(usage=usage), DONE])
    assert record.error is None and record.text == "abc" and record.finish_reason == "length"
    assert [c.time for c in record.chunks] == [1.0, 2.0, 3.0] and record.end == 3.0 and record.sent == 0.0
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (9, 3, 4)
    assert record.counted_by == "usage"


def test_without_usage_chunks_are_counted() -> None:
    record = run([chunk("a"), chunk(""), chunk("b"), chunk("", finish="stop"), DONE])
    assert (record.prompt_tokens, record.output_tokens, record.counted_by) == (7, 2, "chunks")
    assert [c.time for c in record.chunks] == [1.0, 3.0] and record.end == 4.0


def test_usage_that_goes_on_tells_what_each_chunk_brought() -> None:
    usages = [{"prompt_tokens": 9, "completion_tokens": count} for count in (1, 4, 5)]
    record = run(
        [chunk("a", usage=usages[0]), chunk("bcd", usage=usages[1]), chunk("e", usage=usages[2], finish="length")]
    )
    assert [c.tokens for c in record.chunks] == [1, 3, 1] and record.output_tokens == 5


def test_where_tokens_are_counted_a_chunk_is_what_brings_one() -> None:
    """One without text (half of a character, say) does; text that was held back, of tokens before, does not."""
    usages = [{"prompt_tokens": 9, "completion_tokens": count} for count in (0, 1, 2, 3)]
    record = run(
        [
            chunk("", usage=usages[0]),  # the role, in chat
            chunk("a", usage=usages[1]),
            chunk("", usage=usages[2]),
            chunk("é", usage=usages[3]),
            chunk("held back", usage=usages[3], finish="length"),
        ]
    )
    assert record.text == "aéheld back" and record.end == 5.0
    assert [(c.time, c.tokens) for c in record.chunks] == [(2.0, 1), (3.0, 1), (4.0, 1)]


def test_token_ids_tell_it_too() -> None:
    record = run(
        [chunk("a", token_ids=[5]), chunk("", token_ids=[6, 7]), chunk("b", token_ids=[8], finish="length"), DONE]
    )
    assert [c.tokens for c in record.chunks] == [1, 2, 1] and record.token_ids == [5, 6, 7, 8]
    assert (record.output_tokens, record.counted_by) == (4, "usage")


def test_an_answer_without_text() -> None:
    record = run([chunk("", finish="stop"), DONE])
    assert record.error is None and record.end == 1.0 and len(record.chunks) == 1 and record.output_tokens == 0


@pytest.mark.parametrize(
    ("pieces", "kind", "detail"),
    [
        ([chunk("a")], "broken stream", "finish_reason"),
        ([], "broken stream", "finish_reason"),
        ([DONE], "empty answer", "choice"),
        ([chunk("a"), b'data: {"error":{"message":"out of memory"}}\n\n', DONE], "error event", "out of memory"),
        ([chunk("a"), b"data: {oops\n\n", DONE], "broken event", "oops"),
        ([chunk("a"), httpx.ReadError("reset")], "broken connection", "reset"),
        ([httpx.ReadTimeout("slow")], "timeout", "ReadTimeout"),
    ],
)
def test_failures_have_a_kind(pieces: list[bytes | Exception], kind: str, detail: str) -> None:
    record = run(pieces)
    assert record.error == kind and detail in record.error_detail
    assert record.end == float(len(pieces))


def test_a_stream_may_end_without_done() -> None:
    assert run([chunk("a", finish="stop")]).error is None


def test_refusal() -> None:
    record = run([b'{"error":{"message":"the queue is full"}}'], status=429, kind="application/json")
    assert (record.error, record.error_detail) == ("HTTP 429", "the queue is full")


def test_a_server_that_does_not_stream() -> None:
    answer = {
        "choices": [{"text": "abc", "finish_reason": "length"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3},
    }
    record = run([json.dumps(answer).encode()], kind="application/json")
    assert record.error is None and not record.streamed and (record.end, record.output_tokens) == (1.0, 3)
    assert run([b"<html>"], kind="text/html").error == "empty answer"


def test_a_request_that_takes_too_long() -> None:
    async def send() -> RequestRecord:
        async def answer(request: httpx.Request) -> httpx.Response:
            await asyncio.sleep(5)
            raise AssertionError

        async with Server("http://h") as server:
            await server.client.aclose()
            server.client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
            record = RequestRecord(0, 0.0)
            target = HttpTarget(server, ServerFacts("http://h", "m"), RequestOptions(timeout=0.01))
            await target.send(PlannedRequest(0, 0.0, 7, 4), Prompt(text="x"), record, lambda: 0.0)
            return record

    record = asyncio.run(send())
    assert (record.error, record.error_detail) == ("timeout", "no end within 0.01 s")


def test_what_is_sent() -> None:
    server, facts = Server("http://h"), ServerFacts("http://h", "m")
    request = PlannedRequest(0, 0.0, 7, 4, user="u", priority=3)
    options = RequestOptions(extras=("include_usage", "ignore_eos", "user"), extra={"top_k": 3, "temperature": None})
    body = HttpTarget(server, facts, options).body(request, Prompt(token_ids=(1, 2)))
    assert body == {
        "model": "m",
        "max_tokens": 4,
        "prompt": [1, 2],
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "stream": True,
        "user": "u",
        "top_k": 3,
    }
    chat = HttpTarget(server, facts, RequestOptions(chat=True, stream=False, extras=("include_usage", "priority")))
    message = {"role": "user", "content": "x"}
    assert chat.body(request, Prompt(messages=(message,))) == {
        "model": "m",
        "max_tokens": 4,
        "messages": [message],
        "temperature": 0.0,
        "stream": False,
        "priority": 3,
    }
