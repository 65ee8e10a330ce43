"""One caller's deltas between the task that receives them and the consumer that may be slower."""

from __future__ import annotations

import asyncio

from ..outputs import RequestOutput
from .output_processor import merge_delta


class DeltaStream:
    """Merged deltas that wait, and the event that says so. Filled and drained on one event loop.

    What piles up while the consumer sleeps becomes one delta: a slow reader costs memory for its own text and loses nothing.
    """

    def __init__(self) -> None:
        self._pending: RequestOutput | None = None
        self._failure: Exception | None = None
        self._event = asyncio.Event()

    def put(self, delta: RequestOutput) -> None:
        if self._pending is None:
            self._pending = delta
        else:
            merge_delta(self._pending, delta)
        self._event.set()

    def fail(self, error: Exception) -> None:
        """Nothing more will come: `next` raises `error` once what arrived before is delivered."""
        self._failure = error
        self._event.set()

    async def next(self) -> RequestOutput:
        """Waits for something to deliver."""
        while self._pending is None:
            if self._failure is not None:
                raise self._failure
            self._event.clear()
            await self._event.wait()
        output, self._pending = self._pending, None
        return output
