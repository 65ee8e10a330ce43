"""The engine process: `python -m hotswap.core.engine.process`, configured over its standard input."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from typing import BinaryIO

import msgspec
import zmq

from ..clock import SystemClock
from ..config import EngineConfig
from ..contracts.scheduler import RequestUpdate
from ..errors import HotswapError, RequestError
from ..plugin_discovery import Origin, root_cause
from ..plugin_manager import PluginManager
from .engine_core import EngineCore
from .launch import EngineSetup, read_setup
from .wire import (
    AbortRequests,
    Call,
    Dead,
    EngineMessage,
    EngineRequest,
    EngineStats,
    FrontMessage,
    Outputs,
    Ready,
    Reply,
    Shutdown,
    StartupProgress,
)

logger = logging.getLogger("hotswap.engine")

HEARTBEAT_SECONDS = 0.5
LAST_WORD_SECONDS = 30.0  # the front end may still be reading its tokenizer; if it is gone, so is this process
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


class EngineLoop:
    """Messages in, steps, updates out, until told to stop."""

    def __init__(self, core: EngineCore, link: FrontLink) -> None:
        self._core = core
        self._link = link
        self._stopping = False
        self._last_stats = 0.0
        self._last_sent = 0.0

    def run(self) -> None:
        while not self._stopping:
            busy = self._core.has_work()
            for message in self._link.receive(0.0 if busy else HEARTBEAT_SECONDS):
                self._handle(message)
            if self._core.has_work():
                updates = self._core.step()
                if not updates and not self._core.mechanism.num_running:
                    time.sleep(0.001)  # everything waits for something outside the engine
                self._send(updates)
            elif busy or time.monotonic() - self._last_sent >= HEARTBEAT_SECONDS:
                self._send([])

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
        if call.method == "reset_prefix_cache":
            return Reply(call.call_id, self._core.reset_prefix_cache())
        if call.method == "stats":
            return Reply(call.call_id, msgspec.to_builtins(self._stats()))
        if call.method == "check_integrity":
            self._core.mechanism.check_integrity()
            return Reply(call.call_id, True)
        return Reply(call.call_id, error=f"unknown call {call.method!r}")

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
        self._last_sent = now
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
    threading.Thread(target=_exit_with_parent, args=(stdin,), name="parent-watch", daemon=True).start()
    try:
        manager, core = _start(setup, link)
    except HotswapError as error:
        logger.debug("%s", traceback.format_exc())
        return _die(link, str(error), error.exit_code)
    except BaseException as error:  # noqa: BLE001  # whatever it was must reach the front end
        traceback.print_exc()
        return _die(link, root_cause(error))
    try:
        EngineLoop(core, link).run()
        core.shutdown()
    except BaseException as error:  # noqa: BLE001  # the loop's last frame: the front end must learn why it ended
        traceback.print_exc()
        return _die(link, describe_fault(error, manager.owner_of(error)))
    link.close()
    return 0


def _start(setup: EngineSetup, link: FrontLink) -> tuple[PluginManager, EngineCore]:
    from .assembly import assemble_engine, load_manager  # torch comes with it

    config = EngineConfig.from_json(setup.config)
    configure_logging(config.log_level)
    manager = load_manager(setup.plugins)

    def report(what: str, done: int, total: int) -> None:
        link.send(StartupProgress(what, done, total))

    engine = assemble_engine(manager, config, setup.model_path, setup.loader, SystemClock(), report)
    link.send(Ready(engine.info))
    return manager, engine.core


def _die(link: FrontLink, cause: str, exit_code: int = 1) -> int:
    logger.error("the engine stops: %s", cause)
    link.send(Dead(cause, exit_code))
    link.close(LAST_WORD_SECONDS)
    return exit_code


def describe_fault(error: BaseException, owner: Origin | None) -> str:
    """What stopped the loop, and whose code it was when it was a plugin's from outside."""
    cause = root_cause(error)
    return cause if owner is None or owner.builtin else f"{owner.described} failed: {cause}"


def configure_logging(level: str) -> None:
    """One line a record on standard error."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )


def _exit_with_parent(stdin: BinaryIO) -> None:
    """The parent holds the other end of the pipe; when it is gone, so are we, whatever the loop is doing."""
    while stdin.read(4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's and OpenMP's threads need no farewell, and must not delay it
