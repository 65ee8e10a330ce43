"""The server's own application behind an httpx client, in this process and without a socket; answers stream.

What a command asks of its own engine then goes through the same checks, and gets the same answers, as over the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx

App = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[MutableMapping[str, Any]], Awaitable[None]]],
    Awaitable[None],
]


class AppTransport(httpx.AsyncBaseTransport):
    """httpx.ASGITransport holds an answer back until it is complete; this one passes its pieces on as they come."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        call = _Call(await request.aread())
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "server": (request.url.host, request.url.port or 80),
            "client": ("127.0.0.1", 0),
            "state": {},
        }
        call.task = asyncio.create_task(self._run(scope, call))
        head = await call.pieces.get()
        if not isinstance(head, tuple):
            await call.task  # raises what ended it
            raise httpx.RemoteProtocolError("the application ended without an answer")
        status, headers = head
        return httpx.Response(status, headers=headers, stream=_Body(call))

    async def _run(self, scope: MutableMapping[str, Any], call: _Call) -> None:
        try:
            await self._app(scope, call.receive, call.send)
        finally:
            call.pieces.put_nowait(None)


class _Call:
    """One request on its way through the application. pieces: (status, headers), then bytes, then None."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.pieces: asyncio.Queue[tuple[int, Any] | bytes | None] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.pieces.put_nowait((message["status"], message.get("headers", [])))
        elif message["type"] == "http.response.body":
            self.pieces.put_nowait(message.get("body", b""))


class _Body(httpx.AsyncByteStream):
    def __init__(self, call: _Call) -> None:
        self._call = call

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while isinstance(piece := await self._call.pieces.get(), bytes):
            if piece:
                yield piece

    async def aclose(self) -> None:
        """The client has left, or has everything: the application is told, and waited for."""
        self._call.gone.set()
        if self._call.task is not None:
            await asyncio.gather(self._call.task, return_exceptions=True)
