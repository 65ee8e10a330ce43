"""Ends a stream whose reader does not take its data.

What a reader has not taken waits in three places: the kernel's buffers, the connection's (64 KiB), and the request's delta
stream, where it is merged. The third would grow with the answer. A single `send` that does not return within the limit
means that the reader took less than a connection's buffer in all that time: so what waits is never more than the engine
makes for this request in twice that time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Scope, Send

ABORT_EXTENSION = "hotswap.abort"  # of a scope, by our HTTP server: {"abort": closes the connection at once}
LOOKS_PER_LIMIT = 4


class StreamWatch:
    """`with` around a stream's sends. on_stall is called once, when one of them takes longer than `seconds`."""

    def __init__(self, send: Send, seconds: float, on_stall: Callable[[], None]) -> None:
        self._send = send
        self._seconds = seconds
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._sending_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, message: Message) -> None:
        self._sending_since = self._loop.time()
        await self._send(message)
        self._sending_since = None

    def __enter__(self) -> StreamWatch:
        self._look()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """A timer that looks now and then costs nothing per frame."""
        since = self._sending_since
        if since is not None and self._loop.time() - since > self._seconds:
            self._timer = None
            self._on_stall()
        else:
            self._timer = self._loop.call_later(self._seconds / LOOKS_PER_LIMIT, self._look)


def abort_of(scope: Scope) -> Callable[[], None] | None:
    """What closes the connection without waiting for its reader; None under another HTTP server."""
    abort: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT_EXTENSION, {}).get("abort")
    return abort
