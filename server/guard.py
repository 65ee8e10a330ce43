"""The outermost layer: what must hold for every request, whatever its path, before the router sees it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .auth import Authentication
from .errors import ErrorReply, describe
from .limits import BodyRefused, ClientGone, HostCheck, check_header_size, is_valid_request_id

LINGER_SECONDS = 2.0


class Guard:
    """Raw ASGI. Checks header size, request id, key and Host; turns whatever escapes the routes into one error shape.

    The key is checked against `scope["path"]`, which is also what the router matches: no header takes part in it.
    """

    def __init__(
        self, app: ASGIApp, authentication: Authentication, host: HostCheck, on_refused: Callable[[Exception], None]
    ) -> None:
        """on_refused: told of each of our own errors that answers a request before anything was sent."""
        self._app = app
        self._on_refused = on_refused
        self._authentication = authentication
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:  # no route takes a WebSocket
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        request_id, refusal = self._check(scope)
        label = request_id.encode("latin-1")

        async def send_labelled(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", label)]
            await send(message)

        if refusal is not None:
            await refusal.response()(scope, receive, send_labelled)
            return
        scope.setdefault("state", {})["request_id"] = request_id
        try:
            await self._app(scope, receive, send_labelled)
        except ClientGone:
            return
        except BodyRefused as refused:
            await _send_and_linger(refused.reply, receive, send_labelled)
        except Exception as error:  # the last line of defence: the client gets our shape, the log gets the cause
            reply = describe(error, request_id)
            if started:
                raise
            self._on_refused(error)
            await reply.response()(scope, receive, send_labelled)

    def _check(self, scope: Scope) -> tuple[str, ErrorReply | None]:
        """The request's label and the refusal, if any."""
        headers = dict(scope["headers"])
        request_id = f"req-{uuid.uuid4().hex}"
        refusal = check_header_size(scope["headers"])
        if refusal is not None:
            return request_id, refusal
        label = headers.get(b"x-request-id")
        if label is not None:
            if not is_valid_request_id(label):
                message = "X-Request-Id must be 1 to 128 printable ASCII characters"
                return request_id, ErrorReply(400, message, "X-Request-Id", "invalid_request_id")
            request_id = label.decode("ascii")
        refusal = self._authentication.check(scope["path"], headers.get(b"authorization"))
        return request_id, refusal or self._host.check(headers.get(b"host"))


async def _send_and_linger(reply: ErrorReply, receive: Receive, send: Send) -> None:
    """Answers a request whose body is still arriving, then reads a little on: a connection that is closed with unread
    data is reset, and the client would lose the answer."""
    response = reply.response()
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
    await send({"type": "http.response.body", "body": b"", "more_body": False})
