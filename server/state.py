"""What the server knows about itself: its phase, its engine, and the calls that are in flight."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any, Literal

from starlette.types import Receive

from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.core.errors import EngineDeadError, RequestError

from .engine_surface import ServedEngine
from .errors import public_text
from .limits import ClientGone

Phase = Literal["starting", "ready", "draining", "dead"]


class ServerState:
    """One per process; touched on the event loop only. `engine` is set once it exists, which may be before it is
    ready."""

    def __init__(self, config: ServerConfig, engine_config: EngineConfig, engine: ServedEngine | None = None) -> None:
        self.config = config
        self.engine_config = engine_config
        self.engine = engine
        self._draining = False
        self._calls: set[InFlight] = set()
        self._num_accepted = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def phase(self) -> Phase:
        if self.engine is not None and (self.engine.state == "dead" or self._unhealthy() is not None):
            return "dead"
        if self._draining:
            return "draining"
        if self.engine is None or self.engine.state == "starting":
            return "starting"
        return "ready"

    def _unhealthy(self) -> str | None:
        if self.engine is None or self.engine.state == "starting":
            return None
        return self.engine.health()

    def trouble(self) -> RequestError | EngineDeadError | None:
        """Why no request can be served now; None when one can."""
        phase = self.phase
        if phase == "ready":
            return None
        if phase == "dead":
            cause = self.engine.health() if self.engine is not None else None
            return EngineDeadError(public_text(cause or "the engine has ended"))
        words = {
            "starting": "the server is starting: the model is being loaded",
            "draining": "the server is shutting down",
        }
        return RequestError(words[phase], code=phase, status=503)

    def ready_engine(self) -> ServedEngine:
        """The engine, ready for a request. Raises RequestError (503) or EngineDeadError."""
        trouble = self.trouble()
        if trouble is not None:
            raise trouble
        if self.engine is None:
            raise RuntimeError("a server without trouble has an engine")
        return self.engine

    @property
    def model_names(self) -> list[str]:
        """The names that requests may use; the first one is what answers carry."""
        names = self.engine_config.model.served_model_name
        return list(names) if names else [self.engine_config.model.model]

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Absent and "" mean the served model. Raises RequestError (404)."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(repr(known) for known in self.model_names)
            if public_text(served) != served:  # a path: an error cannot say it in whole
                served = "one that is named by its path; the list of models (v1/models) has the name"
            raise RequestError(
                f"this model is not served here; there is {served}", param="model", code="model_not_found", status=404
            )
        return name

    # Draining.

    def enter(self, call: InFlight) -> None:
        self._calls.add(call)
        self._idle.clear()

    def leave(self, call: InFlight) -> None:
        self._calls.discard(call)
        self._note_idle()

    def accept(self) -> None:
        self._num_accepted += 1
        self._idle.clear()

    def release(self) -> None:
        self._num_accepted -= 1
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._calls and not self._num_accepted:
            self._idle.set()

    @property
    def num_calls(self) -> int:
        """Requests whose body is here and whose answer is not complete."""
        return max(len(self._calls), self._num_accepted)  # every call in flight was accepted before

    def begin_drain(self) -> None:
        """From now on the server is not ready and takes nothing new."""
        self._draining = True

    async def wait_idle(self, timeout: float) -> bool:
        """True once nothing is in flight; False when time ran out."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def interrupt_calls(self) -> None:
        """Ends every call in flight with an error."""
        for call in list(self._calls):
            call.interrupt(RequestError("the server is shutting down", code="draining", status=503))


class Accepted:
    """A request that draining waits for: from the moment its body is here until its answer has been sent. Before, a
    slow sender could hold up the end; later than that, a request that is being tokenized would be cut off."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._entered = False

    def enter(self) -> None:
        if not self._entered:
            self._entered = True
            self._state.accept()

    def leave(self) -> None:
        if self._entered:
            self._entered = False
            self._state.release()


class InFlight:
    """`async with` around the work of one call: ends it when its client leaves or the server must stop.

    On exit the work's cancellation becomes `ClientGone` or the error given to `interrupt`; a cancellation from
    elsewhere stays. Entered after the body was read: from then on the only message that `receive` can bring is a
    disconnect.
    """

    def __init__(self, state: ServerState, receive: Receive) -> None:
        self._state = state
        self._receive = receive
        self._task: asyncio.Task[Any] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reason: Exception | None = None

    async def __aenter__(self) -> InFlight:
        self._task = asyncio.current_task()
        self._watch = asyncio.create_task(self._wait_for_disconnect(), name="disconnect-watch")
        self._state.enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state.leave(self)
        task, self._task = self._task, None
        if self._watch is not None:
            self._watch.cancel()
        if self._reason is None or task is None:
            return
        if task.uncancel() > 0:
            return  # somebody else cancels as well: theirs stands
        if not isinstance(error, asyncio.CancelledError):
            await _absorb_cancellation()  # ours came as the work ended, and was not delivered yet
        if error is None or isinstance(error, asyncio.CancelledError):
            raise self._reason from None

    def interrupt(self, reason: Exception) -> None:
        """Cancels the work; the first reason counts."""
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(ClientGone())


async def _absorb_cancellation() -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
