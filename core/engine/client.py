"""The async front end: lives in the API process, talks to the engine process. No torch here.

One task receives; each request has a `DeltaStream` that the task fills and the request's consumer drains. Deltas that pile up
while the consumer sleeps are merged, so a slow reader costs memory for its own text only and loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ..clock import SystemClock
from ..config import EngineConfig
from ..contracts.scheduler import RequestUpdate
from ..contracts.tool_parser import ToolParser
from ..errors import EngineDeadError, HotswapError, ModelLoadError, RequestError, UsageError
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .delta_stream import DeltaStream
from .front_end import FrontEnd
from .launch import EngineProcess, describe_exit
from .wire import (
    AbortRequests,
    Call,
    Dead,
    EngineInfo,
    EngineMessage,
    EngineStats,
    FrontMessage,
    Heartbeat,
    Outputs,
    Ready,
    Reply,
    Shutdown,
    StartupProgress,
)

logger = logging.getLogger("hotswap.client")

SHUTDOWN_SECONDS = 3.0  # what the engine gets to end its step and close its observers


class EngineClient:
    """Everything that the server needs of an engine. Made before the event loop runs, started inside it."""

    def __init__(
        self,
        process: EngineProcess,
        front: FrontEnd,
        config: EngineConfig,
        front_rows: Sequence[dict[str, Any]] = (),
    ) -> None:
        """front_rows: the inventory rows of the kinds that are chosen in this process."""
        self._front_rows = front_rows
        self._process = process
        self._front = front
        self._config = config
        self._context = zmq.asyncio.Context()
        self._inputs = self._bound_socket(zmq.PUSH, process.input_address)
        self._outputs = self._bound_socket(zmq.PULL, process.output_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
        self._streams: dict[int, DeltaStream] = {}  # by id() of the RequestState
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._last_message = time.monotonic()
        self._heartbeat = Heartbeat(0.0)
        self._watcher: threading.Thread | None = None
        self._death: EngineDeadError | None = None
        self._connected = False  # whether the front end knows the engine's facts
        self._ready: asyncio.Future[EngineInfo] | None = None
        self.stats = EngineStats()
        self.on_progress: Callable[[StartupProgress], None] | None = None

    def _bound_socket(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise HotswapError(
                f"cannot open the socket {address}: {error.strerror}; if its path is too long, set TMPDIR to a short one"
            ) from error
        return socket

    # What the server reads.

    @property
    def info(self) -> EngineInfo:
        return self._front.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._front.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._front.chat_template

    @property
    def tool_parser(self) -> ToolParser | None:
        return self._front.tool_parser

    @property
    def generation_defaults(self) -> dict[str, Any]:
        return self._front.generation_defaults

    @property
    def num_requests(self) -> int:
        """Callers' requests that are not finished."""
        return len(self._streams)

    @property
    def state(self) -> str:
        """ "starting", "ready" or "dead"."""
        if self._death is not None:
            return "dead"
        return "ready" if self._connected else "starting"

    def health(self) -> str | None:
        """None when healthy, else the cause: dead, stuck (no step ended, or nothing was heard, for --engine-stuck-timeout
        seconds), or without one of the threads and tasks that it needs."""
        if self._death is not None:
            return str(self._death)
        if any(task.done() for task in self._tasks):
            return "a background task of the API process has ended"
        if self.state == "starting":
            return None
        if self._watcher is not None and not self._watcher.is_alive():
            return "the thread that watches the engine process has ended"
        if self._heartbeat.dead_threads:
            return f"threads of the engine have ended: {', '.join(self._heartbeat.dead_threads)}"
        limit = self._config.engine_stuck_timeout
        silence = time.monotonic() - self._last_message
        if silence > limit:
            return f"the engine is stuck: nothing was heard from it for {silence:.0f} s"
        if self._heartbeat.stalled_seconds > limit:
            return f"the engine is stuck: no step has ended for {self._heartbeat.stalled_seconds:.0f} s"
        return None

    # Life.

    async def start(self) -> EngineInfo:
        """Waits until the engine is ready. Raises what stopped it (UsageError, ModelLoadError, EngineDeadError)."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._tasks.append(loop.create_task(self._receive(), name="engine-outputs"))
        self._watcher = threading.Thread(target=self._watch_process, args=(loop,), name="engine-watch", daemon=True)
        self._watcher.start()
        info = await self._ready
        self._front.connect(info, SystemClock())
        self._connected = True
        return info

    async def shutdown(self) -> None:
        """Ends the engine; requests still in flight fail. Idempotent."""
        if self._death is None:
            self._die("the server is shutting down")
            self._send(Shutdown())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._inputs.close(linger=500)
        self._outputs.close(linger=0)
        await asyncio.to_thread(self._process.close, wait_s=SHUTDOWN_SECONDS)
        self._context.destroy(linger=0)

    def kill(self) -> None:
        """Ends the engine at once, without an event loop: for a start-up that was interrupted."""
        self._process.close(timeout_s=0.5)

    # Work.

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields deltas until every choice is finished. Closing the iterator aborts in the engine and frees the blocks.

        Raises RequestError before the first delta for a request that cannot be served, EngineDeadError when the engine goes.
        What the engine itself refuses (its queue is full) or gives up comes as a delta with `error`.
        """
        self._check_open()
        requests = self._front.inputs.process(
            prompt_token_ids, params, priority=priority, user=user, cache_salt=cache_salt
        )
        state = self._front.outputs.add(request_id, prompt, requests)
        stream = DeltaStream()
        self._streams[id(state)] = stream
        try:
            for request in requests:
                self._send(request)
            finished = False
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            running = self._front.outputs.forget(state)
            self._streams.pop(id(state), None)
            if running and self._death is None:
                self._send(AbortRequests(running))

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False when some are in use."""
        return bool(await self.call("reset_prefix_cache"))

    async def call(self, method: str, **arguments: Any) -> Any:
        """An administrative call. Raises HotswapError with the engine's own words."""
        self._check_open()
        self._num_calls += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[self._num_calls] = future
        self._send(Call(self._num_calls, method, arguments))
        result = await future
        return merge_rows(result, self._front_rows) if method == "inventory" else result

    def _check_open(self) -> None:
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        if self.state == "starting":
            raise RequestError("the engine is still starting", code="starting", status=503)

    def _send(self, message: FrontMessage) -> None:
        """Never awaited: a send waits for ever once the engine is gone, and its caller would not hear of the death. A
        `finally` that runs while its task is being cancelled can send as well."""
        self._inputs.send(self._encoder.encode(message))

    async def _receive(self) -> None:
        try:
            while True:
                frame = await self._outputs.recv()
                self._last_message = time.monotonic()
                try:
                    message = self._decoder.decode(frame)
                except msgspec.DecodeError as error:
                    logger.warning("dropped a frame that is not one of ours: %s", error)
                    continue
                self._handle(message)
                await asyncio.sleep(0)  # recv() of what is there already does not give way to other tasks
        except Exception as error:  # whatever it was: without this task every stream would hang
            logger.exception("nothing more is received from the engine")
            self._die(f"the API process cannot read the engine's messages: {type(error).__name__}: {error}")

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, Outputs):
            if message.stats is not None:
                self.stats = message.stats
            for update in message.updates:
                self._deliver(update)
        elif isinstance(message, Ready):
            message.info.inventory = merge_rows(message.info.inventory, self._front_rows)
            if self._connected:
                self._front.refresh(message.info)
            elif self._ready is not None and not self._ready.done():
                self._ready.set_result(message.info)
        elif isinstance(message, Heartbeat):
            self._heartbeat = message
        elif isinstance(message, StartupProgress):
            if self.on_progress is not None:
                self.on_progress(message)
        elif isinstance(message, Reply):
            future = self._calls.pop(message.call_id, None)
            if future is not None and not future.done():
                if message.error is not None:
                    future.set_exception(HotswapError(message.error))
                else:
                    future.set_result(message.result)
        elif isinstance(message, Dead):
            self._die(message.cause, message.exit_code)

    def _deliver(self, update: RequestUpdate) -> None:
        """To the stream of the request that it belongs to."""
        try:
            routed = self._front.outputs.apply(update)
        except Exception:
            # Making one request's text must not end the task that serves all.
            logger.exception("engine request %d is given up", update.request_id)
            routed = self._front.outputs.give_up(update.request_id)
        if routed is None:
            return
        state, delta = routed
        if state.to_abort:
            self._send(AbortRequests(state.to_abort))
            state.to_abort = []
        stream = self._streams.get(id(state))
        if stream is not None:
            stream.put(delta)

    def _die(self, cause: str, exit_code: int = 1) -> None:
        """The first cause is the root cause and stays."""
        if self._death is not None:
            return
        self._death = EngineDeadError(cause)
        self._death.exit_code = exit_code
        if self._ready is not None and not self._ready.done():
            kinds: dict[int, type[HotswapError]] = {2: UsageError, 1: ModelLoadError}
            self._ready.set_exception(kinds.get(exit_code, EngineDeadError)(cause))
        for stream in list(self._streams.values()):
            stream.fail(self._death)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(cause))
        self._calls.clear()

    def _watch_process(self, loop: asyncio.AbstractEventLoop) -> None:
        status = self._process.wait()
        # A dying engine's last message is still on its way; what it says goes before what its exit status says.
        time.sleep(0.2)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            loop.call_soon_threadsafe(self._on_exit, status)

    def _on_exit(self, status: int) -> None:
        if self._death is None:
            logger.error("%s", describe_exit(status))
        self._die(describe_exit(status), max(status, 1))


def merge_rows(engine_rows: list[dict[str, Any]], own_rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One inventory: of the kinds in `own_rows` those rows, where the engine has its own."""
    own_kinds = {row["kind"] for row in own_rows}
    merged: list[dict[str, Any]] = []
    for row in engine_rows:
        if row["kind"] not in own_kinds:
            merged.append(row)
        elif not any(before["kind"] == row["kind"] for before in merged):
            merged += [own for own in own_rows if own["kind"] == row["kind"]]
    return merged
