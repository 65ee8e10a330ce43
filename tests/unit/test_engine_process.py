"""The engine process at its edges: what it imports, and its last word."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from hotswap.core.engine.launch import EngineProcess
from hotswap.core.engine.process import FrontLink, _die
from hotswap.core.engine.wire import Dead, EngineMessage


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
