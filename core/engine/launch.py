"""Starts the engine process: by exec, with its configuration as one message on a pipe.

The pipe stays open for as long as the parent lives; the engine ends when it closes, so no orphan survives its server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, BinaryIO

import msgspec

_LENGTH = struct.Struct("<I")
MAX_SETUP_BYTES = 64 * 2**20


class EngineSetup(msgspec.Struct):
    """All that the engine process is told.

    config: EngineConfig as JSON. plugins: the frozen plugin list. environment: variables to set before torch is loaded, where
    the operator has not set them. model_path, loader: the checkpoint, already fetched.
    input_address, output_address: ZeroMQ endpoints on unix sockets that the parent has bound.
    """

    config: bytes
    plugins: bytes
    environment: dict[str, str]
    model_path: str
    loader: str
    input_address: str
    output_address: str


def write_setup(stream: IO[bytes], setup: EngineSetup) -> None:
    """One length-prefixed message."""
    payload = msgspec.msgpack.encode(setup)
    stream.write(_LENGTH.pack(len(payload)) + payload)
    stream.flush()


def read_setup(stream: BinaryIO) -> EngineSetup:
    """Raises EOFError when the parent went away first, ValueError on a message that is not one of ours."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError("the parent process closed the pipe before it sent a configuration")
    (length,) = _LENGTH.unpack(header)
    if length > MAX_SETUP_BYTES:
        raise ValueError(f"the configuration message claims {length} bytes")
    return msgspec.msgpack.decode(stream.read(length), type=EngineSetup)


class EngineProcess:
    """The engine as a child process. Owned by one client, which closes it."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hotswap-"))  # mkdtemp gives mode 0700
        self.input_address = f"ipc://{self._folder / 'in'}"
        self.output_address = f"ipc://{self._folder / 'out'}"
        # Imports come from where they come from here, and with -P not from the working directory: that may be a
        # downloaded model's folder, whose files must not be run.
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "hotswap.core.engine.process"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def configure(self, setup: EngineSetup) -> None:
        """Sends the configuration. The child may have died already: then waiting for it tells why."""
        stream = self._child.stdin
        if stream is None:
            raise RuntimeError("the engine process was started without a pipe")
        with contextlib.suppress(BrokenPipeError):  # the exit status says it better than the pipe
            write_setup(stream, setup)

    def wait(self) -> int:
        """Blocks until the child ends; its exit status."""
        return self._child.wait()

    def poll(self) -> int | None:
        return self._child.poll()

    def close(self, timeout_s: float = 5.0, *, wait_s: float = 0.0) -> None:
        """Ends the child: the closed pipe asks, SIGKILL insists. Idempotent.

        wait_s: first wait so long for a child that was told to end by a message.
        """
        if wait_s > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(wait_s)
        if self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it is gone already
                self._child.stdin.close()
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"the engine process exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (out of memory? the kernel's log says)" if -status == signal.SIGKILL else ""
    return f"the engine process was killed by {name}{hint}"
