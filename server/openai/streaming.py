"""Server-sent events: chunks assembled from bytes prepared once per stream, and the response that sends them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import DONE_FRAME, describe
from ..limits import ClientGone
from ..state import InFlight, ServerState
from ..stream_watch import StreamWatch, abort_of
from .generation import Generation
from .protocol import StreamOptions

log = logging.getLogger("hotswap.server")
_encode = msgspec.json.encode
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ChunkWriter:
    """Builds one stream's chunks. What is constant in a stream (id, object, created, model) is encoded once."""

    def __init__(self, generation: Generation, object_name: str, options: StreamOptions | None) -> None:
        head = {
            "id": generation.answer_id,
            "object": object_name,
            "created": generation.created,
            "model": generation.model,
        }
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._usage = generation.usage
        self._include_usage = options is not None and options.include_usage is True
        self._every_usage = self._include_usage and options is not None and options.continuous_usage_stats is True
        self._choice_heads: dict[int, bytes] = {}
        self._tail = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    def choice(self, index: int, payload: bytes, top_level: bytes = b"") -> bytes:
        """A chunk with one choice. payload: the choice's JSON after its index, e.g. `"text":"x","finish_reason":null`.
        top_level: further members of the chunk itself, each starting with a comma."""
        head = self._choice_heads.get(index)
        if head is None:
            head = self._choice_heads[index] = self._head + b'{"index":%d,' % index
        if not top_level and not self._every_usage:
            return b"".join((head, payload, b"}", self._tail))
        usage = (
            b',"usage":' + (_encode(self._usage.as_dict()) if self._every_usage else b"null")
            if self._include_usage
            else b""
        )
        return b"".join((head, payload, b"}]", top_level, usage, b"}\n\n"))

    def last(self) -> bytes:
        """What follows the last choice: the usage chunk, when asked for, and the end mark."""
        if not self._include_usage:
            return DONE_FRAME
        return self._head + b'],"usage":' + _encode(self._usage.as_dict()) + b"}\n\n" + DONE_FRAME


def encode_member(name: bytes, value: Any) -> bytes:
    """`,"name":value`"""
    return b',"' + name + b'":' + _encode(value)


def end_of_choice(finish_reason: str | None, stop_reason: int | str | None) -> bytes:
    """The members that every choice of every chunk ends with."""
    if finish_reason is None:
        return b',"finish_reason":null'
    return b',"finish_reason":' + _encode(finish_reason) + b',"stop_reason":' + _encode(stop_reason)


class EventStream(Response):
    """Sends frames as server-sent events.

    The status line waits for the first frame: a fault before it is an ordinary error reply. A fault after it is an
    error frame and the end mark. A client that leaves ends the work at once; one that reads slowly makes the frames
    wait in the engine's client, where they are merged; one that does not read is cut off (StreamWatch).
    """

    media_type = "text/event-stream"

    def __init__(self, state: ServerState, request_id: str, frames: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        super().__init__(None, 200, _HEADERS)
        del self.headers["content-length"]
        self._state = state
        self._request_id = request_id
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        call = InFlight(self._state, receive)

        def on_stall() -> None:
            log.warning("request %s: its reader takes nothing; the connection is closed", self._request_id)
            if (abort := abort_of(scope)) is not None:
                abort()
            call.interrupt(ClientGone())

        with StreamWatch(send, self._state.config.max_stream_backlog_seconds, on_stall) as watch:
            try:
                async with call, aclosing(self._frames()) as frames:
                    async for frame in frames:
                        if not started:
                            started = True
                            await watch.send(
                                {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                            )
                        await watch.send({"type": "http.response.body", "body": frame, "more_body": True})
            except ClientGone:
                raise
            except Exception as error:  # whatever it is, a stream that has begun must end with a word, not with silence
                if not started:
                    raise
                frame = describe(error, self._request_id).frame() + DONE_FRAME
                await watch.send({"type": "http.response.body", "body": frame, "more_body": True})
            await watch.send({"type": "http.response.body", "body": b"", "more_body": False})
