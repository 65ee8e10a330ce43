"""Every fault that leaves the server, in one shape: OpenAI's `{"error": {"message", "type", "param", "code"}}`.

`describe` is the only place where an exception becomes text for a client. Exceptions that are not ours never show their
own message: it can hold paths, addresses of objects or what somebody else sent.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hotswap.core.errors import EngineDeadError, HotswapError, RequestError

log = logging.getLogger("hotswap.server")

DONE_FRAME = b"data: [DONE]\n\n"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_RETRY_AFTER_SECONDS = {429: "1", 503: "5"}
_HTTP_MESSAGES = {
    404: "nothing is served at this path",
    405: "this method is not allowed at this path",
}
MAX_MESSAGE_CHARS = 500
_PATH = re.compile(r"(?<![\w:/.])(?:/[\w.+@~-]+){2,}")
_ADDRESS = re.compile(r" (?:object )?at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A fault as the client sees it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> bytes:
        error: dict[str, Any] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        headers = dict(self.headers)
        if self.status in _RETRY_AFTER_SECONDS:
            headers.setdefault("retry-after", _RETRY_AFTER_SECONDS[self.status])
        return Response(self.body(), self.status, headers, media_type="application/json")

    def frame(self) -> bytes:
        """As a server-sent event, for a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"


def describe(error: BaseException, request_id: str) -> ErrorReply:
    """What the client is told. Logs what it is not told, under the same request id."""
    if isinstance(error, RequestError):
        if error.status >= 500 and error.status not in (503, 504):
            log.error("request %s failed: %s", request_id, error.message)
        return ErrorReply(error.status, public_text(error.message), error.param, error.code)
    if isinstance(error, EngineDeadError):
        return ErrorReply(503, public_text(f"the engine is not running: {error}"), code="engine_dead")
    if isinstance(error, HTTPException):
        return _describe_http(error)
    if isinstance(error, RequestValidationError):
        return ErrorReply(400, "the request is not valid")
    if isinstance(error, HotswapError):
        log.error("request %s failed: %s", request_id, error)
    else:
        log.error("request %s failed", request_id, exc_info=error)
    return ErrorReply(
        500, f"internal error; the server's log has the cause under request id {request_id}", code="internal_error"
    )


def _describe_http(error: HTTPException) -> ErrorReply:
    status = error.status_code
    message = _HTTP_MESSAGES.get(status)
    if message is None:
        message = HTTPStatus(status).phrase.lower() if status in HTTPStatus._value2member_map_ else "the request failed"
    code = {404: "path_not_found", 405: "method_not_allowed"}.get(status)
    return ErrorReply(status, message, code=code, headers=dict(error.headers or {}))


def public_text(text: str) -> str:
    """One line without paths of this machine and addresses of objects, cut to a sane length."""
    line = " ".join(text.split())
    line = _ADDRESS.sub("", line)
    line = _PATH.sub(lambda match: "…/" + match.group().rsplit("/", 1)[1], line)
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 1] + "…"
