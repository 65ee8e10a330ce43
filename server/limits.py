"""Bounds that hold before any work is done: header block, Host, request id, body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from starlette.requests import Request

from .errors import ErrorReply
from .listening import is_loopback

MAX_HEADER_BYTES = 64 * 1024
MAX_REQUEST_ID_CHARS = 128
BODY_TIMEOUT_SECONDS = 60.0
_PRINTABLE = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
Headers = Iterable[tuple[bytes, bytes]]


class BodyRefused(Exception):
    """The body is too large, too slow or cut short; the reply says which."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.message)
        self.reply = reply


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


def check_header_size(headers: Headers) -> ErrorReply | None:
    size = sum(len(name) + len(value) + 4 for name, value in headers)
    if size > MAX_HEADER_BYTES:
        return ErrorReply(431, f"the header block is larger than {MAX_HEADER_BYTES} bytes", code="headers_too_large")
    return None


def is_valid_request_id(value: bytes) -> bool:
    """A label of up to 128 printable ASCII characters. It is echoed and logged, never used as a key."""
    return len(value) <= MAX_REQUEST_ID_CHARS and _PRINTABLE.fullmatch(value) is not None


class HostCheck:
    """On a loopback bind, accepts only Host headers that name this machine, so that a web page cannot reach the server
    by pointing its own name at 127.0.0.1 (DNS rebinding). On other binds everything passes."""

    def __init__(self, bind_host: str) -> None:
        self._active = is_loopback(bind_host)

    def check(self, host: bytes | None) -> ErrorReply | None:
        if not self._active or host is None or is_loopback(_without_port(host.decode("latin-1"))):
            return None
        return ErrorReply(
            400,
            "the Host header does not name this machine, and the server listens on a loopback address only; "
            "a proxy must send 'Host: localhost'",
            code="invalid_host",
        )


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, never holding more than `max_bytes` of it. Raises BodyRefused, ClientGone."""
    too_large = BodyRefused(
        ErrorReply(
            413, f"the request body is larger than {max_bytes} bytes (--max-request-bytes)", code="request_too_large"
        )
    )
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        slow = f"the request body did not arrive within {BODY_TIMEOUT_SECONDS:.0f} s"
        raise BodyRefused(ErrorReply(408, slow, code="request_timeout")) from None
