"""The engine process: `python -m hotswap.core.engine.process`, configured over its standard input."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import zmq

from .. import logs
from ..clock import SystemClock
from ..config import EngineConfig
from ..contracts.scheduler import RequestUpdate
from ..errors import HotswapError, RequestError
from ..plugin_discovery import Origin, root_cause
from ..plugin_manager import PluginManager
from .launch import EngineSetup, read_setup
from .quiet_gc import settle_process
from .wire import (
    AbortRequests,
    Call,
    Dead,
    EngineMessage,
    EngineRequest,
    EngineStats,
    FrontMessage,
    Heartbeat,
    Outputs,
    Ready,
    Reply,
    Shutdown,
    StartupProgress,
)

if TYPE_CHECKING:
    from .assembly import AssembledEngine

logger = logging.getLogger("hotswap.engine")

HEARTBEAT_SECONDS = 0.5
LAST_WORD_SECONDS = 30.0  # the front end may still be reading its tokenizer; if it is gone, so is this process
FAREWELL_SECONDS = 2.0  # what the loop gets to end by itself when the parent is gone
STATS_SECONDS = 0.05  # gauges travel at most this often, and whenever the engine falls idle


class FrontLink:
    """The engine's end of the two sockets. One thread uses it."""

    def __init__(self, input_address: str, output_address: str) -> None:
        self._context = zmq.Context()
        self._inputs = self._context.socket(zmq.PULL)
        self._inputs.set_hwm(0)
        self._inputs.connect(input_address)
        self._outputs = self._context.socket(zmq.PUSH)
        self._outputs.set_hwm(0)
        self._outputs.connect(output_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FrontMessage] = msgspec.msgpack.Decoder(FrontMessage)
        self.num_bad_frames = 0

    def send(self, message: EngineMessage) -> None:
        self._outputs.send(self._encoder.encode(message))

    def receive(self, timeout_s: float) -> list[FrontMessage]:
        """Every message that is there, waiting at most `timeout_s` for the first."""
        messages: list[FrontMessage] = []
        if timeout_s > 0 and not self._inputs.poll(int(timeout_s * 1000)):
            return messages
        while True:
            try:
                frame = self._inputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self._decoder.decode(frame))
            except (msgspec.DecodeError, RequestError) as error:
                self.num_bad_frames += 1
                logger.warning("dropped a frame that is not one of ours: %s", error)

    def close(self, linger_s: float = 1.0) -> None:
        """linger_s: how long to wait for a front end that has not taken every message yet."""
        self._outputs.close(linger=int(linger_s * 1000))
        self._inputs.close(linger=0)
        self._context.term()


class HeartbeatThread:
    """Says twice a second how long the loop has not come round, and which threads have ended. Has a socket of its own:
    sockets belong to one thread.

    stalled_seconds: asked of the loop. threads: those that must live as long as the engine.
    """

    def __init__(
        self, output_address: str, stalled_seconds: Callable[[], float], threads: Sequence[threading.Thread]
    ) -> None:
        self._address = output_address
        self._stalled_seconds = stalled_seconds
        self._threads = threads
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Waits for the thread: its socket must be closed before the process ends."""
        self._ended.set()
        self.thread.join(1.0)

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(self._address)
        encoder = msgspec.msgpack.Encoder()
        try:
            while not self._ended.wait(HEARTBEAT_SECONDS):
                dead = [thread.name for thread in self._threads if not thread.is_alive()]
                socket.send(encoder.encode(Heartbeat(self._stalled_seconds(), dead)))
        finally:
            context.destroy(linger=0)


class EngineLoop:
    """Messages in, steps, updates out, until told to stop."""

    def __init__(self, engine: AssembledEngine, link: FrontLink) -> None:
        self._core = engine.core
        self._admin = engine.admin
        self._link = link
        self._stopping = False
        self._last_stats = 0.0
        self._last_turn = time.monotonic()

    def stop(self) -> None:
        """Ends `run` between two steps. May be called from any thread."""
        self._stopping = True

    def stalled_seconds(self) -> float:
        """Since the loop last came round. May be called from any thread."""
        return time.monotonic() - self._last_turn

    def run(self) -> None:
        while not self._stopping:
            self._last_turn = time.monotonic()
            busy = self._core.has_work()
            for message in self._link.receive(0.0 if busy else HEARTBEAT_SECONDS):
                self._handle(message)
            if self._core.has_work():
                updates = self._core.step()
                if not updates and not self._core.mechanism.num_running:
                    time.sleep(0.001)  # everything waits for something outside the engine
                self._send(updates)
            elif busy:
                self._send([])
            else:
                self._core.executor.check_health()  # a worker that is gone is found before a request needs it

    def _handle(self, message: FrontMessage) -> None:
        if isinstance(message, EngineRequest):
            refusal = self._core.add_request(message)
            if refusal is not None:
                self._send([refusal])
        elif isinstance(message, AbortRequests):
            self._core.abort(message.request_ids)
        elif isinstance(message, Call):
            self._link.send(self._answer(message))
        elif isinstance(message, Shutdown):
            self._stopping = True

    def _answer(self, call: Call) -> Reply:
        try:
            self._stats()
            result = self._admin.answer(call)
        except HotswapError as error:
            return Reply(call.call_id, error=str(error))
        if self._admin.info_changed:
            self._admin.info_changed = False
            self._link.send(Ready(self._admin.info))
        return Reply(call.call_id, result)

    def _stats(self) -> EngineStats:
        stats = self._core.stats()
        stats.num_bad_frames = self._link.num_bad_frames
        return stats

    def _send(self, updates: list[RequestUpdate]) -> None:
        now = time.monotonic()
        due = now - self._last_stats >= STATS_SECONDS or not self._core.has_work()
        if not updates and not due:
            return
        if due:
            self._last_stats = now
        self._link.send(Outputs(updates, self._stats() if due else None))


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the server's to handle: it drains
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stdin = sys.stdin.buffer
    try:
        setup = read_setup(stdin)
    except EOFError:
        return 0
    for name, value in setup.environment.items():
        os.environ.setdefault(name, value)
    link = FrontLink(setup.input_address, setup.output_address)
    parent = ParentWatch(stdin)
    try:
        manager, engine = _start(setup, link)
    except HotswapError as error:
        logger.debug("%s", traceback.format_exc())
        return _die(link, str(error), error.exit_code)  # the front end prints it
    except BaseException as error:  # whatever it was must reach the front end
        logger.error("the engine cannot start", exc_info=error)
        return _die(link, root_cause(error))
    return _serve(setup, link, manager, engine, parent)


def _serve(
    setup: EngineSetup, link: FrontLink, manager: PluginManager, engine: AssembledEngine, parent: ParentWatch
) -> int:
    """The loop, from the first message to the last; the exit status."""
    settle_process()
    loop = EngineLoop(engine, link)
    parent.ask_first(loop.stop)
    heartbeat = HeartbeatThread(setup.output_address, loop.stalled_seconds, [parent.thread])
    heartbeat.start()
    link.send(Ready(engine.info))
    try:
        loop.run()
        engine.core.shutdown()
    except BaseException as error:  # noqa: BLE001 - the loop's last frame: the front end must learn why it ended
        cause = tell_fault(error, manager.owner_of(error), EngineConfig.from_json(setup.config))
        heartbeat.stop()
        return _die(link, cause, farewell=engine.core.close_observers)
    heartbeat.stop()
    link.close()
    return 0


def _start(setup: EngineSetup, link: FrontLink) -> tuple[PluginManager, AssembledEngine]:
    from .assembly import assemble_engine, load_manager  # torch comes with it

    config = EngineConfig.from_json(setup.config)
    logs.configure(config.log_level, config.log_format)
    manager = load_manager(setup.plugins)

    def report(what: str, done: int, total: int) -> None:
        link.send(StartupProgress(what, done, total))

    return manager, assemble_engine(manager, config, setup.model_path, setup.loader, SystemClock(), report)


def _die(link: FrontLink, cause: str, exit_code: int = 1, farewell: Callable[[], None] = lambda: None) -> int:
    """Says why, then takes leave of whoever must hear of it, then waits for the front end to have read it."""
    link.send(Dead(cause, exit_code))
    farewell()
    link.close(LAST_WORD_SECONDS)
    return exit_code


def tell_fault(error: BaseException, owner: Origin | None, config: EngineConfig) -> str:
    """Logs and returns what stopped the loop, in one line, and whose code it was when it was a plugin's from outside. Where a
    device had no memory the line says what to change, and no traceback follows unless at the level debug."""
    from ..runner.memory_report import explain_step_out_of_memory

    shortage = explain_step_out_of_memory(error, config)
    cause = shortage or root_cause(error)
    if owner is not None and not owner.builtin:
        cause = f"{owner.described} failed: {cause}"
    logger.error("the engine stops: %s", cause)
    logger.log(logging.DEBUG if shortage else logging.ERROR, "it was raised here:", exc_info=error)
    return cause


class ParentWatch:
    """The parent holds the other end of the pipe; when it is gone, so are we, whatever the loop is doing."""

    def __init__(self, stdin: BinaryIO) -> None:
        self._stdin = stdin
        self._ask: Callable[[], None] | None = None
        self.thread = threading.Thread(target=self._run, name="parent-watch", daemon=True)
        self.thread.start()

    def ask_first(self, ask: Callable[[], None]) -> None:
        """From now on `ask` is called first, and the process gets a moment to end by itself: observers have files to close."""
        self._ask = ask

    def _run(self) -> None:
        while self._stdin.read(4096):
            pass
        if self._ask is not None:
            self._ask()
            time.sleep(FAREWELL_SECONDS)
        os._exit(0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's and OpenMP's threads need no farewell, and must not delay it
