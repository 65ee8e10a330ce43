"""The body parser refuses what a lenient parser would guess at."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest

from hotswap.core.errors import RequestError
from hotswap.server.json_body import SMALL_BODY_BYTES, parse_json_object, parsed

GOOD = {
    b'{"a": 1}': {"a": 1},
    b' {"a":"\\ud83d\\ude00"} ': {"a": "😀"},
    '{"a":"é😀"}'.encode(): {"a": "é😀"},
    b'{"a":{"a":{}}}': {"a": {"a": {}}},
    b'{"a":"[[{{"}': {"a": "[[{{"},
    b'{"a":"' + b"[" * 300_000 + b'"}': {"a": "[" * 300_000},
    b'{"a":-0}': {"a": 0},
    b'{"a":"' + b'\\"' * 300_000 + b'"}': {"a": '"' * 300_000},
    b'{"a":"' + b"," * 1_100_000 + b'","b":"\\\\"}': {"a": "," * 1_100_000, "b": "\\"},
    b'{"a":[' + b"1," * 999_999 + b"1]}": {"a": [1] * 1_000_000},
}
BAD = [
    b"",
    b"   ",
    b"{",
    b"[1]",
    b"3",
    b"null",
    b'"x"',
    b"\xef\xbb\xbf{}",
    '{"a":1}'.encode("utf-16"),
    b'{"a":1} x',
    b'{"a":1}{"a":1}',
    b'{"a":1,"a":2}',
    b'{"a":{"b":1,"b":1}}',
    b'{"a":NaN}',
    b'{"a":Infinity}',
    b'{"a":-Infinity}',
    b'{"a":1e400}',
    b'{"a":"\xff"}',
    b'{"a":"\xc0\xaf"}',
    b'{"a":"\xed\xa0\xbd"}',
    b'{"a":"\\ud83d"}',
    b'{"a":"\\ude00"}',
    b'{"\\ud83d":1}',
    b'{"a":"\x00"}',
    b'{"a":01}',
    b'{"a":1,}',
    b"{'a':1}",
    b'{"a":' + b"9" * 5000 + b"}",
    b'{"a":' + b"[" * 128 + b"]" * 128 + b"}",
    b'{"a":' * 200 + b"1" + b"}" * 200,
    b'{"a":[' * 70 + b"1" + b"]}" * 70,
    b'{"a":[' + b"[]," * 100_000 + b"[]]}",
    b'{"a":[' + b"1," * 1_000_000 + b"1]}",
    b'{"a":[' + b'"",' * 200_000 + b'""]}',
    b'{"a":{' + b",".join(b'"%06d":1' % n for n in range(200_001)) + b"}}",
]


@pytest.mark.parametrize("body", GOOD, ids=lambda body: repr(body[:24]))
def test_accepts(body: bytes) -> None:
    assert parse_json_object(body) == GOOD[body]


@pytest.mark.parametrize("body", BAD, ids=lambda body: repr(body[:24]))
def test_refuses(body: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        parse_json_object(body)
    assert refused.value.status == 400
    assert refused.value.code == "invalid_json"


def test_nesting_of_127_passes() -> None:
    value: Any = parse_json_object(b'{"a":' + b"[" * 127 + b"]" * 127 + b"}")["a"]
    for _ in range(126):
        value = value[0]
    assert value == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":' * 200_000,
        b"[" * 1_000_000,
        b'{"a":"' + b'\\"' * 500_000,
        b'{"a":[' + b"[]," * 300_000 + b"[]]}",
        b"[" * 99_000 + b"]" * 99_000,
    ],
    ids=["objects", "lists", "quotes", "wide", "closed"],
)
def test_hostile_bodies_are_quick(body: bytes) -> None:
    begin = time.perf_counter()
    with contextlib.suppress(RequestError):
        parse_json_object(body)
    assert time.perf_counter() - begin < 2.0


def test_s45_large_bodies_are_parsed_off_the_event_loop() -> None:
    def thread_of(body: bytes) -> threading.Thread:
        return threading.current_thread()

    async def threads() -> tuple[threading.Thread, threading.Thread]:
        return await parsed(thread_of, b"x" * SMALL_BODY_BYTES), await parsed(thread_of, b"x" * (SMALL_BODY_BYTES + 1))

    small, large = asyncio.run(threads())
    assert small is threading.current_thread()
    assert large is not threading.current_thread()
