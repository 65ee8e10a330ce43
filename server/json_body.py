"""A request body to a JSON object, strictly: what a lenient parser would guess at is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from hotswap.core.errors import RequestError

from .limits import read_body

MAX_DEPTH = 128
MAX_CONTAINERS = 100_000  # objects and lists: each costs tens of bytes of memory for two of the body
MAX_STRINGS = 200_000  # keys among them
MAX_VALUES = 1_000_000  # that are parsed in one go, while nothing else is done
SMALL_BODY_BYTES = 32 * 1024  # parsed on the event loop: a thread would cost more than it saves
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
ResultT = TypeVar("ResultT")


class _DuplicateKeyError(ValueError):
    pass


async def read_json_bytes(request: Request, max_bytes: int) -> bytes:
    """The body of a request that says it is JSON. Raises RequestError (415) or limits.BodyRefused (408, 413)."""
    check_content_type(request)
    return await read_body(request, max_bytes)


async def parsed(parse: Callable[[bytes], ResultT], body: bytes) -> ResultT:
    """`parse(body)`; of a large body in a thread, so that other requests are served meanwhile. Raises what `parse` raises."""
    return parse(body) if len(body) <= SMALL_BODY_BYTES else await asyncio.to_thread(parse, body)


def check_content_type(request: Request) -> None:
    """JSON in UTF-8, not compressed. Raises RequestError (415)."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise RequestError("compressed request bodies are not accepted", code="unsupported_media_type", status=415)
    media_type, *parameters = (part.strip().lower() for part in request.headers.get("content-type", "").split(";"))
    charsets = [p.partition("=")[2].strip('" ') for p in parameters if p.startswith("charset")]
    if media_type != "application/json" or any(charset not in ("utf-8", "utf8") for charset in charsets):
        raise RequestError(
            "the request must have the header 'Content-Type: application/json'",
            code="unsupported_media_type",
            status=415,
        )


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The object that `body` spells. Raises RequestError (400).

    Refused: bytes that are not UTF-8, a byte-order mark, lone surrogates, NaN and Infinity, numbers out of range,
    trailing data, nesting over 128, a key given twice, anything but an object at the top.
    """
    if not body.strip():
        raise _refuse("the request body is empty; it must be a JSON object")
    if body.startswith(b"\xef\xbb\xbf"):
        raise _refuse("the request body starts with a byte-order mark")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH or len(body) > min(MAX_STRINGS, MAX_VALUES):
        _check_structure(body)
    try:
        value = msgspec.json.decode(body)
        if type(value) is dict:
            json.loads(body, object_pairs_hook=_check_pairs)  # msgspec keeps the last of two equal keys without a word
    except _DuplicateKeyError:
        raise _refuse("the request body has an object with the same key twice") from None
    except (msgspec.MsgspecError, UnicodeError, ValueError, RecursionError):
        raise _refuse("the request body is not valid JSON in UTF-8") from None
    if type(value) is not dict:
        raise _refuse("the request body must be a JSON object")
    return value


def _refuse(message: str) -> RequestError:
    return RequestError(message, code="invalid_json")


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise _DuplicateKeyError


def _check_structure(body: bytes) -> None:
    """Bounds nesting and numbers before anything is built. Linear for each level, in C.

    Backslashes outside strings, which are an error anyway, can only change what comes after them.
    """
    parts = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if parts.count(b'"') > 2 * MAX_STRINGS:
        raise _refuse(f"the request body holds more than {MAX_STRINGS} strings")
    bare = b"".join(parts.split(b'"')[::2])  # a string that does not end is taken to the end of the body
    if bare.count(b",") >= MAX_VALUES:
        raise _refuse(f"the request body holds more than {MAX_VALUES} values")
    skeleton = bare.translate(_ONE_KIND, _NO_BRACKETS)
    if skeleton.count(b"[") > MAX_CONTAINERS:
        raise _refuse(f"the request body holds more than {MAX_CONTAINERS} objects and lists")
    for _ in range(MAX_DEPTH):
        skeleton = skeleton.replace(b"[]", b"")  # takes the innermost level away
    if b"[]" in skeleton:
        raise _refuse(f"the request body is nested more than {MAX_DEPTH} deep")
