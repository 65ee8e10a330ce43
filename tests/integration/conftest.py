"""Fixtures for tests over a real socket: the server in a thread, with a fake engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest


class LiveServer:
    """A server on a free port of 127.0.0.1."""

    def __init__(self, engine: Any, settings: dict[str, Any]) -> None:
        from hotswap.core.config import EngineConfig, ServerConfig
        from hotswap.server.app import create_app
        from hotswap.server.http_server import HttpServer
        from hotswap.server.listening import bind
        from hotswap.server.state import ServerState

        self.engine = engine
        self.state = ServerState(ServerConfig(**settings), EngineConfig.from_flat(model="tiny"), engine)
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = HttpServer(create_app(self.state), self.state)
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([listener])))
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def raw(self, data: bytes) -> bytes:
        """Sends bytes and reads until the server closes, or says no more for a while."""
        with self.connect() as connection:
            connection.sendall(data)
            connection.settimeout(2)
            received = b""
            try:
                while chunk := connection.recv(65536):
                    received += chunk
            except TimeoutError:
                pass
            return received

    def ask(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Sends a request and leaves the connection open."""
        connection = self.connect()
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def eventually() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def live() -> Iterator[Callable[..., LiveServer]]:
    """live(engine=None, **server settings)"""
    servers: list[LiveServer] = []

    def make(engine: Any = None, **settings: Any) -> LiveServer:
        from hotswap.core.testing.fake_engine import FakeEngine

        servers.append(LiveServer(engine or FakeEngine(), settings))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()
