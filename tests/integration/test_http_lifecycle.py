"""A server process: refused ports, readiness, signals, start-up errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
# The real command, with the engine's start replaced by a fake one.
PROGRAM = """
import sys, time
from hotswap.core.errors import ModelLoadError, UsageError
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.server.cli import serve, main

def launch(config, manager, progress):
    progress("weights", 0, 10)
    time.sleep({load_seconds})
    if {error!r} == "load":
        raise ModelLoadError("no such model: xyz")
    if {error!r} == "usage":
        raise UsageError("--dtype is wrong")
    return FakeEngine(lambda prompt, choice: [80] * 200, step_seconds={step_seconds})

serve.launch_engine = launch
sys.exit(main(["serve", "tiny", "--port", "{port}", *{flags!r}]))
"""


class Process:
    def __init__(self, folder: Path, **settings: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        settings = {"load_seconds": 0, "error": None, "step_seconds": 0.01, "port": free, "flags": [], **settings}
        self.port = settings["port"]
        self.url = f"http://127.0.0.1:{self.port}"
        self.output = folder / f"output-{time.monotonic_ns()}"
        program = PROGRAM.format(**settings)
        with self.output.open("wb") as stream:
            self.child = subprocess.Popen(
                [sys.executable, "-c", program], stdout=stream, stderr=subprocess.STDOUT, env=ENVIRONMENT
            )

    def text(self) -> str:
        return self.output.read_text()

    def health(self) -> httpx.Response | None:
        try:
            return httpx.get(f"{self.url}/health")
        except httpx.TransportError:
            return None

    def until_ready(self) -> None:
        end = time.monotonic() + 30
        while "serves tiny" not in self.text():
            assert self.child.poll() is None and time.monotonic() < end, self.text()
            time.sleep(0.02)

    def wait(self, seconds: float = 10) -> int:
        return self.child.wait(seconds)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(**settings: Any) -> Process:
        started.append(Process(tmp_path, **settings))
        return started[-1]

    yield make
    for process in started:
        process.child.kill()
        process.child.wait()


def test_ready_line_and_idle_sigterm(start: Callable[..., Process]) -> None:
    process = start()
    process.until_ready()
    text = process.text()
    assert f"{process.url}/v1" in text and "curl " in text
    assert httpx.get(f"{process.url}/health").status_code == 200
    begin = time.monotonic()
    process.child.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert time.monotonic() - begin < 3
    assert "Traceback" not in process.text()


def test_503_until_ready_and_sigterm_meanwhile(start: Callable[..., Process]) -> None:
    process = start(load_seconds=60)
    end = time.monotonic() + 20
    while (reply := process.health()) is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "starting" and reply.headers["retry-after"]
    assert httpx.post(f"{process.url}/v1/completions", json={"prompt": "a"}).status_code == 503
    begin = time.monotonic()
    process.child.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert time.monotonic() - begin < 3
    assert "Traceback" not in process.text()


@pytest.mark.parametrize(("error", "status"), [("load", 1), ("usage", 2)])
def test_start_errors_are_one_line(start: Callable[..., Process], error: str, status: int) -> None:
    process = start(error=error, load_seconds=0.3)
    assert process.wait() == status
    lines = [line for line in process.text().splitlines() if "weights" not in line]
    assert len(lines) == 1 and lines[0].startswith("hotswap: error:")


def test_taken_port(start: Callable[..., Process]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        begin = time.monotonic()
        process = start(port=taken.getsockname()[1], load_seconds=60)
        assert process.wait() == 1
        assert time.monotonic() - begin < 5
        assert process.text().count("\n") == 1 and "--port" in process.text()


def test_bad_settings_are_usage_errors(start: Callable[..., Process]) -> None:
    for flags in (["--metrics-namespace", "a b"], ["--api-key", ""], ["--host", "0.0.0.0", "--strict-auth"]):
        process = start(flags=flags, load_seconds=60)
        assert process.wait() == 2, process.text()
        lines = [line for line in process.text().splitlines() if "weights" not in line]
        assert len(lines) == 1, process.text()


def stream_in_background(process: Process, max_tokens: int) -> subprocess.Popen[str]:
    """A client in a process of its own: prints every event."""
    body = {"prompt": "a", "max_tokens": max_tokens, "stream": True}
    code = (
        "import httpx\n"
        f"with httpx.stream('POST', '{process.url}/v1/completions', json={body!r}, timeout=60) as reply:\n"
        "    for line in reply.iter_lines():\n"
        "        if line: print(line, flush=True)\n"
    )
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None and client.stdout.readline().startswith("data:")
    return client


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_drain_lets_requests_finish(start: Callable[..., Process], signal_number: int) -> None:
    process = start(flags=["--shutdown-timeout", "20"])
    process.until_ready()
    client = stream_in_background(process, 150)
    process.child.send_signal(signal_number)
    time.sleep(0.3)
    health = process.health()
    assert health is not None and health.status_code == 503 and health.json()["error"]["code"] == "draining"
    refused = httpx.post(f"{process.url}/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503 and refused.headers["retry-after"]
    output = client.communicate(timeout=20)[0].splitlines()
    assert output[-1] == "data: [DONE]"
    assert json.loads(output[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert process.wait() == 0


def test_drain_deadline_ends_with_an_error_frame(start: Callable[..., Process]) -> None:
    process = start(flags=["--shutdown-timeout", "0.5"], step_seconds=0.1)
    process.until_ready()
    client = stream_in_background(process, 200)
    begin = time.monotonic()
    process.child.send_signal(signal.SIGTERM)
    output = client.communicate(timeout=20)[0].splitlines()
    assert output[-1] == "data: [DONE]"
    assert json.loads(output[-2][6:])["error"]["code"] == "draining"
    assert process.wait() == 0
    assert time.monotonic() - begin < 5


def test_second_signal_is_now(start: Callable[..., Process]) -> None:
    process = start(flags=["--shutdown-timeout", "60"], step_seconds=0.2)
    process.until_ready()
    client = stream_in_background(process, 200)
    process.child.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    begin = time.monotonic()
    process.child.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert time.monotonic() - begin < 4
    assert client.communicate(timeout=20)[0].splitlines()[-1] == "data: [DONE]"


def test_public_bind_warns_once(start: Callable[..., Process]) -> None:
    process = start(flags=["--host", "0.0.0.0"])
    process.until_ready()
    assert process.text().count("WARNING") == 1
    process.child.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_chat_command_against_it(start: Callable[..., Process]) -> None:
    process = start()
    process.until_ready()
    code = "import sys; from hotswap.server.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["chat", "--url", process.url, "--once", "hello", "--max-tokens", "5"]
    answer = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=30, check=False, env=ENVIRONMENT
    )
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.strip()) == 5 and len(set(answer.stdout.strip())) == 1
