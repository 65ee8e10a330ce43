"""The real command with a real engine process and a tiny model: many clients, clients that leave, a killed engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hotswap.core.testing.tiny_models import make_tiny_model

COMMAND = "import sys; from hotswap.server.cli import main; sys.exit(main(sys.argv[1:]))"
FLAGS = ["--num-gpu-blocks-override", "400", "--max-num-seqs", "64", "--served-model-name", "tiny"]


class Served:
    """A `hotswap serve` process."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        model = make_tiny_model(folder / "model")
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "serve", str(model), "--port", str(port), *FLAGS],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        end = time.monotonic() + 120
        while " serves tiny on " not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    def engine_pid(self) -> int:
        tasks = Path(f"/proc/{self.process.pid}/task")
        children = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        (pid,) = [
            pid for pid in children if b"hotswap.core.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return pid

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"hotswap:{name}"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("served"))
    yield server
    server.process.kill()
    server.process.wait()


def test_64_clients_at_once(served: Served) -> None:
    """Joined deltas equal the non-stream text, for every one of them; usage equals the counters."""
    before = served.metric("generation_tokens_total")

    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, str, int]:
        prompt = f"client {number} asks: " + "why " * (number % 9)
        arguments: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 24,
            "temperature": 0.8,
            "seed": number,
        }
        stream = await client.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
        text, tokens = "", 0
        async for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            tokens += chunk.usage.completion_tokens if chunk.usage else 0
        whole = await client.completions.create(**arguments)
        return text, whole.choices[0].text, tokens + whole.usage.completion_tokens

    async def run() -> list[tuple[str, str, int]]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    results = asyncio.run(run())
    assert [streamed for streamed, _, _ in results] == [whole for _, whole, _ in results]
    assert served.metric("generation_tokens_total") - before == sum(tokens for _, _, tokens in results)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(served: Served, stream: bool) -> None:
    aborted = served.metric('request_success_total{engine="0",finished_reason="abort"')
    body = {"prompt": "a b c", "max_tokens": 240, "ignore_eos": True, "n": 8, "stream": stream}
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            if stream:
                with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=5) as reply:
                    next(reply.iter_raw())
                    raise httpx.ReadTimeout("enough")
            httpx.post(f"{served.url}/v1/completions", json=body, timeout=0.15)
    end = time.monotonic() + 2
    while served.metric("num_requests_running") + served.metric("kv_cache_usage_perc") > 0:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert served.metric('request_success_total{engine="0",finished_reason="abort"') == aborted + 24


def test_a_killed_engine_is_told(served: Served) -> None:
    """Last: nothing is served after it."""
    lines: list[str] = []
    body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "n": 16, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=10) as reply:
        for line in reply.iter_lines():
            if not lines:
                os.kill(served.engine_pid(), signal.SIGKILL)
            if line:
                lines.append(line)
    assert lines[-1] == "data: [DONE]" and "SIGKILL" in lines[-2]
    health = httpx.get(f"{served.url}/health")
    assert health.status_code == 503 and "SIGKILL" in health.json()["error"]["message"]
    assert httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}).status_code == 503
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(10) == 1
    assert "Traceback" not in served.log.read_text()
