"""The blocking part of an engine's start. Light to import: it runs while the HTTP side is imported."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from .engine_surface import ServedEngine

if TYPE_CHECKING:
    from hotswap.core.engine.wire import EngineInfo


class StartableEngine(ServedEngine, Protocol):
    """An engine client that still has to be started on the event loop."""

    async def start(self) -> EngineInfo: ...
    def kill(self) -> None: ...


class BackgroundStart:
    """Runs the blocking part of an engine's start in a daemon thread: it may download for minutes, and a signal must
    not wait."""

    def __init__(self, launch: Callable[[], StartableEngine]) -> None:
        self._launch = launch
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._abandoned = False
        self._engine: StartableEngine | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="engine-start", daemon=True).start()

    def _run(self) -> None:
        try:
            engine = self._launch()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._error = error
        else:
            with self._lock:
                self._engine = engine
                if self._abandoned:
                    engine.kill()
        self._done.set()

    async def engine(self) -> StartableEngine:
        """Raises what `launch` raised."""
        while not self._done.is_set():
            await asyncio.sleep(0.02)
        if self._error is not None:
            raise self._error
        if self._engine is None:
            raise RuntimeError("the start ended with neither an engine nor an error")
        return self._engine

    def abandon(self) -> None:
        """Ends the engine, now or as soon as it exists."""
        with self._lock:
            self._abandoned = True
            if self._engine is not None:
                self._engine.kill()
