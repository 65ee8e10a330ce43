"""The API process is light: no torch, no transformers, and no HTTP stack before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys


def modules_after(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return set(done.stdout.split())


def test_the_server_needs_neither_torch_nor_transformers() -> None:
    loaded = modules_after(
        "import hotswap.server.serving, hotswap.server.cli.serve, hotswap.server.cli.chat_backends\n"
        "import hotswap.core.engine.client, hotswap.core.engine.start\n"
        "from hotswap.core.config import *\n"
        "from hotswap.core.testing.fake_engine import FakeEngine\n"
        "from hotswap.server.state import ServerState\n"
        "hotswap.server.serving.create_app(ServerState(ServerConfig(), EngineConfig(), FakeEngine()))"
    )
    assert "fastapi" in loaded
    assert not loaded & {"torch", "transformers", "numpy.linalg", "llvmlite", "numba"}


def test_commands_are_light_until_they_run() -> None:
    for command in ("serve", "chat"):
        loaded = modules_after(f"import hotswap.server.cli.{command}")
        assert not loaded & {"torch", "fastapi", "uvicorn", "httpx", "zmq", "rich.console"}, command
