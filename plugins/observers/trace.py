"""Observer `trace`: writes one line for each finished request, without its text, to be replayed later.

The format is `TraceRow` in JSON, what `hotswap bench --trace` and `hotswap recommend` read.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts import PluginError, TraceRow
from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.observer import FinishedRequest, Observer, ObserverContext
from hotswap.core.contracts.policy import RequestView
from hotswap.core.contracts.provider import Provider

CLOSE_SECONDS = 0.9


class TraceOptions(BaseModel):
    """Options of the observer."""

    model_config = ConfigDict(extra="forbid")

    path: Path = Field(description="The file to write; one that is there is replaced.")


class Trace(Observer):
    """Arrivals are counted from the first one. Lines are written by a thread, in the order in which requests end, and are
    in the file at once."""

    def __init__(self, path: Path) -> None:
        """Raises PluginError when the file cannot be written."""
        try:
            self._file: BinaryIO = path.expanduser().open("wb", buffering=0)
        except OSError as error:
            raise PluginError(f"observer 'trace': cannot write {path}: {error.strerror}") from error
        self._path = path
        self._origin: float | None = None
        self._rows: queue.SimpleQueue[TraceRow | None] = queue.SimpleQueue()
        self._fault: OSError | None = None
        self._thread = threading.Thread(target=self._write, name="trace-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # an offline engine that nobody shuts down

    def on_arrival(self, view: RequestView) -> None:
        if self._origin is None:
            self._origin = view.arrival_time

    def on_finish(self, request: FinishedRequest) -> None:
        """Raises what the writing thread met: the engine logs it once."""
        if self._fault is not None:
            raise self._fault
        origin = request.arrival_time if self._origin is None else self._origin
        self._rows.put(
            TraceRow(
                arrival=round(max(0.0, request.arrival_time - origin), 6),
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                user=request.user,
                priority=request.priority,
            )
        )

    def close(self) -> None:
        atexit.unregister(self.close)
        self._rows.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _write(self) -> None:
        encoder = msgspec.json.Encoder()
        with self._file as file:
            while (row := self._rows.get()) is not None:
                try:
                    file.write(encoder.encode(row) + b"\n")
                except OSError as error:  # a full disk: told with the next request, and tried no more
                    self._fault = OSError(error.errno, f"{error.strerror}; nothing more is written", str(self._path))
                    return


@hookimpl
def hotswap_observer() -> Iterator[Provider[Observer]]:
    def build(context: ObserverContext) -> Observer:
        if not isinstance(context.options, TraceOptions):
            raise PluginError("observer 'trace' needs its options")
        return Trace(context.options.path)

    yield Provider(
        name="trace",
        build=build,
        options=TraceOptions,
        summary="writes a trace file of finished requests, without text",
    )
