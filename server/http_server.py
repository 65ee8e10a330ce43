"""The HTTP/1.1 server: uvicorn, with our error shape for what is no HTTP, and with draining.

One process, h11: its limits hold for the header block (64 KiB), and a client that sends its headers too slowly is cut
off.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ErrorReply
from .limits import MAX_HEADER_BYTES
from .listening import BACKLOG
from .state import ServerState
from .stream_watch import ABORT_EXTENSION

log = logging.getLogger("hotswap.server")

KEEP_ALIVE_SECONDS = 65  # above the 60 s of common load balancers, so that they close first
HEADER_SECONDS = 30.0
# How long the last answer on a connection has to leave.
FAREWELL_SECONDS = 2


class Protocol(H11Protocol):
    """Answers what is no HTTP in our error shape, and gives a client HEADER_SECONDS to finish its headers."""

    _header_deadline: asyncio.TimerHandle | None = None
    _farewell: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()
        app = self.app

        async def with_abort(scope: Scope, receive: Receive, send: Send) -> None:
            """close() would wait until a reader that takes nothing has taken everything."""
            scope.setdefault("extensions", {})[ABORT_EXTENSION] = {"abort": transport.abort}
            await app(scope, receive, send)

        self.app = with_abort

    def data_received(self, data: bytes) -> None:
        if self._farewell is not None:
            return  # the rest of what was no HTTP
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        if self._farewell is not None:
            self._farewell.cancel()
        super().connection_lost(exc)

    def _watch_headers(self) -> None:
        """The deadline runs from the first byte (or the connection) to the end of the header block."""
        if self.conn.their_state is not h11.IDLE:
            self._cancel_deadline()
        elif self._header_deadline is None:
            self._header_deadline = self.loop.call_later(HEADER_SECONDS, self._headers_too_slow)

    def _cancel_deadline(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    def _headers_too_slow(self) -> None:
        self._header_deadline = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Called inside uvicorn's `except h11.RemoteProtocolError`; its hint tells headers that are too large from the
        rest."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer is on its way: nothing can be said in between
            return
        status = getattr(sys.exception(), "error_status_hint", 400)
        if status == 431:
            reply = ErrorReply(
                431, f"the header block is larger than {MAX_HEADER_BYTES} bytes", code="headers_too_large"
            )
        else:
            reply = ErrorReply(400, "this is not a valid HTTP/1.1 request", code="invalid_http")
        body = reply.body()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (
            h11.Response(status_code=reply.status, headers=headers, reason=b""),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        # Reads on a little before it closes: data that nobody reads resets the connection and loses the answer.
        self.transport.write_eof()
        self._farewell = self.loop.call_later(FAREWELL_SECONDS, self.transport.close)


class HttpServer(uvicorn.Server):
    """uvicorn that drains: on the first SIGTERM or SIGINT the socket stays open, so that probes and new requests are
    told 503, until the requests in flight are done or their time is up; the second signal ends it now."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FAREWELL_SECONDS,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what clients send wrong is no news of ours
        self._state = state
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_signals = 0
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs between two bytecodes of the main thread: only wakes the loop. Not recorded, so that uvicorn does not
        raise the signal again at the end: a drained server exits with 0."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(sig).name)

    def _on_signal(self, name: str) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._drain = asyncio.create_task(self._drain_and_stop(name), name="drain")
        else:
            log.warning("%s again: stopping now", name)
            self._state.interrupt_calls()
            self.should_exit = True

    async def _drain_and_stop(self, name: str) -> None:
        timeout = self._state.config.shutdown_timeout
        self._state.begin_drain()
        if self._state.num_calls:
            log.warning("%s: %d requests get %g s to finish", name, self._state.num_calls, timeout)
        if not await self._state.wait_idle(timeout):
            log.warning("%d requests did not finish in %g s and are ended", self._state.num_calls, timeout)
            self._state.interrupt_calls()
        self.should_exit = True
