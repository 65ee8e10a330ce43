"""The real command on the card: a thousand requests, none lost, the pool whole afterwards."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

COMMAND = "import sys; from hotswap.server.cli import main; sys.exit(main(sys.argv[1:]))"
NUM_REQUESTS = 1000
NUM_CLIENTS = 128


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("served") / "log"
    flags = ["--port", str(port), "--served-model-name", "smol", "--kv-cache-memory-bytes", str(2**31)]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "serve", str(smollm2_path), *flags],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    end = time.monotonic() + 180
    while " serves smol on " not in log.read_text():
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(60)


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"hotswap:{name}"))


async def ask(client: httpx.AsyncClient, url: str, number: int, gate: asyncio.Semaphore) -> int:
    """Tokens that the answer reports."""
    body = {
        "model": "smol",
        "prompt": f"Number {number} is " + "very " * (number % 40),
        "max_tokens": 4 + number % 29,
        "temperature": (number % 3) * 0.5,
        "seed": number,
        "ignore_eos": True,
    }
    async with gate:
        answer = await client.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    facts = answer.json()
    assert facts["choices"][0]["finish_reason"] == "length", facts
    assert facts["usage"]["completion_tokens"] == body["max_tokens"]
    return int(facts["usage"]["completion_tokens"])


def test_a_thousand_requests(url: str) -> None:
    async def all_of_them() -> list[int]:
        gate = asyncio.Semaphore(NUM_CLIENTS)
        limits = httpx.Limits(max_connections=NUM_CLIENTS)
        async with httpx.AsyncClient(limits=limits) as client:
            return await asyncio.gather(*(ask(client, url, number, gate) for number in range(NUM_REQUESTS)))

    started = time.monotonic()
    counts = asyncio.run(all_of_them())
    seconds = time.monotonic() - started
    print(f"{NUM_REQUESTS} requests, {sum(counts)} tokens in {seconds:.1f} s: {sum(counts) / seconds:.0f} tokens/s")
    assert len(counts) == NUM_REQUESTS
    end = time.monotonic() + 10
    while metric(url, "num_requests_running") or metric(url, "kv_cache_usage_perc"):
        assert time.monotonic() < end, "blocks or requests are held although nobody asks"
        time.sleep(0.1)
    assert metric(url, "generation_tokens_total") == sum(counts)
    assert httpx.get(f"{url}/health").status_code == 200
