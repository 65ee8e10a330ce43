"""The outermost layer: what must hold for every request, whatever its path, before the router sees it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotswap.core import logs

from .auth import Authentication
from .errors import ErrorReply, describe
from .limits import BodyRefused, ClientGone, HostCheck, check_header_size, is_valid_request_id
from .state import Accepted, ServerState

LINGER_SECONDS = 2.0


class Guard:
    """Raw ASGI. Checks header size, request id, key and Host; turns whatever escapes the routes into one error shape.

    The key is checked against `scope["path"]`, which is also what the router matches: no header takes part in it.
    """

    def __init__(
        self,
        app: ASGIApp,
        authentication: Authentication,
        host: HostCheck,
        state: ServerState,
        on_refused: Callable[[Exception], None],
    ) -> None:
        """on_refused: told of each of our own errors that answers a request before anything was sent."""
        self._app = app
        self._on_refused = on_refused
        self._authentication = authentication
        self._host = host
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:  # no route takes a WebSocket
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id, refusal = self._check(scope)
        exchange = _Exchange(scope, receive, send, request_id)
        if refusal is not None:
            await refusal.response()(scope, exchange.receive, exchange.send)
            return
        accepted = Accepted(self._state)
        scope.setdefault("state", {}).update(request_id=request_id, accepted=accepted)
        token = logs.request_id.set(request_id)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except ClientGone:
            return
        except BodyRefused as refused:
            await refused.reply.response()(scope, exchange.receive, exchange.send)
        except Exception as error:  # the last line of defence: the client gets our shape, the log gets the cause
            reply = describe(error, request_id)
            if exchange.started:
                raise
            self._on_refused(error)
            await reply.response()(scope, exchange.receive, exchange.send)
        finally:
            accepted.leave()
            logs.request_id.reset(token)

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


class _Exchange:
    """One request's messages: labels the answer, and knows whether the request's body has arrived.

    An answer that comes before the body has arrived ends the connection: the rest of the body is nobody's. It is read a
    little on first: a connection that is closed with unread data is reset, and the client would lose the answer.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self._receive = receive
        self._send = send
        self._label = (b"x-request-id", request_id.encode("latin-1"))
        self._body_arrived = not _announces_body(scope)
        self._closes = False
        self.started = False

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):
            self._body_arrived = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = [*message.get("headers", ()), self._label]
            if not self._body_arrived:
                self._closes = True
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        elif self._closes and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _linger(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while not self._body_arrived:
                    await self.receive()


def _announces_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )
