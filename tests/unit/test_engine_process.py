"""The engine process at its edges: what it imports, and its last word."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zmq

from hotswap.core.engine.launch import EngineProcess
from hotswap.core.engine.process import EngineLoop, FrontLink, HeartbeatThread, _die
from hotswap.core.engine.wire import (
    Call,
    Dead,
    EngineInfo,
    EngineMessage,
    EngineStats,
    FrontMessage,
    Heartbeat,
    Ready,
    Reply,
    Shutdown,
)
from hotswap.core.kv_cache import PoolIntegrityError


def test_the_engine_imports_nothing_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a downloaded model's folder (S-08)."""
    marker = tmp_path / "marker"
    for name in ("msgspec", "zmq", "torch"):
        (tmp_path / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    process = EngineProcess()
    try:
        stdin = process._child.stdin
        assert stdin is not None
        stdin.close()  # no configuration: it ends once it is imported
        assert process.wait() == 0
    finally:
        process.close()
    assert not marker.exists()


def test_the_last_word_waits_for_a_front_end_that_is_not_there_yet() -> None:
    """The API process binds its sockets after it has read the tokenizer, which may take seconds."""
    folder = Path(tempfile.mkdtemp(prefix="hs-"))
    link = FrontLink(f"ipc://{folder / 'in'}", f"ipc://{folder / 'out'}")
    thread = threading.Thread(target=_die, args=(link, "the cause", 2))
    thread.start()
    time.sleep(1.5)
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.bind(f"ipc://{folder / 'out'}")
    try:
        assert socket.poll(3000)
        assert msgspec.msgpack.decode(socket.recv(), type=EngineMessage) == Dead("the cause", 2)
        thread.join(3)
        assert not thread.is_alive()
    finally:
        context.destroy(linger=0)


def listener(folder: Path) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.bind(f"ipc://{folder / 'out'}")
    return context, socket


def test_s41_heartbeats_go_on_while_the_loop_waits_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotswap.core.engine.process.HEARTBEAT_SECONDS", 0.02)
    folder = Path(tempfile.mkdtemp(prefix="hs-"))
    context, socket = listener(folder)
    gone = threading.Thread(target=lambda: None, name="gone")
    gone.start()
    gone.join()
    stalled = iter([0.1, 7.5, *[9.0] * 1000])
    heartbeat = HeartbeatThread(f"ipc://{folder / 'out'}", lambda: next(stalled), [threading.main_thread(), gone])
    heartbeat.start()
    try:
        heard = [msgspec.msgpack.decode(socket.recv(), type=EngineMessage) for _ in range(3) if socket.poll(3000)]
        assert heard == [Heartbeat(seconds, ["gone"]) for seconds in (0.1, 7.5, 9.0)]
        heartbeat.stop()
        assert not heartbeat.thread.is_alive()
    finally:
        context.destroy(linger=0)


class StandIn:
    """What the loop needs of an engine, with answers of our choice."""

    def __init__(self) -> None:
        self.core: Any = self
        self.admin: Any = self
        self.executor: Any = self
        self.mechanism: Any = self
        self.num_running = 0
        self.info_changed = False
        self.info = EngineInfo("tiny", "Tiny", "float32", 64, 63, 512, 16, 16, 4, 64, "cpu")
        self.health_checks = 0

    def has_work(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats()

    def check_health(self) -> None:
        self.health_checks += 1

    def answer(self, call: Call) -> Any:
        if call.method == "broken":
            raise PoolIntegrityError("block 3 leaks")
        self.info_changed = call.method == "set_policy"
        return call.method


class RecordingLink:
    def __init__(self) -> None:
        self.sent: list[EngineMessage] = []
        self.num_bad_frames = 0
        self.incoming: list[list[FrontMessage]] = []

    def send(self, message: EngineMessage) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float) -> list[FrontMessage]:
        return self.incoming.pop(0) if self.incoming else [Shutdown()]


def test_a_call_that_fails_is_answered_and_the_loop_goes_on() -> None:
    engine, link = StandIn(), RecordingLink()
    link.incoming = [[Call(1, "broken")], [Call(2, "stats")], [Call(3, "set_policy")]]
    loop = EngineLoop(cast(Any, engine), cast(Any, link))
    loop.run()
    assert link.sent == [Reply(1, error="block 3 leaks"), Reply(2, "stats"), Ready(engine.info), Reply(3, "set_policy")]
    assert engine.health_checks == 4, "while nothing runs, somebody looks after the worker"
    assert loop.stalled_seconds() < 5


def test_the_last_word_comes_before_the_farewell() -> None:
    said: list[str] = []

    class Link:
        def send(self, message: EngineMessage) -> None:
            said.append(type(message).__name__)

        def close(self, linger_s: float) -> None:
            said.append("closed")

    assert _die(cast(Any, Link()), "cause", 3, farewell=lambda: said.append("farewell")) == 3
    assert said == ["Dead", "farewell", "closed"]
