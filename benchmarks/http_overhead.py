#!/usr/bin/env python3
"""What the HTTP side costs: requests and streamed tokens per second of one server, with a model that answers in no time.

    python benchmarks/http_overhead.py                      # the mock model: the server is all that there is to measure
    python benchmarks/http_overhead.py --model default      # SmolLM2: how 64 clients share the cores with the engine
    python benchmarks/http_overhead.py --clients 1,16,64 --seconds 10 --out results.jsonl

The server is the real command `hotswap serve`: API process, engine process, scheduler, wire. The client is another process: raw
sockets, keep-alive, no JSON parsing, so that it takes as little of the machine as it can; its share of the CPU is printed,
and so is that of each process of the server (from /proc).

tasks: short   non-streamed completions of one token: requests/s
       whole   non-streamed completions of 64 tokens: requests/s and tokens/s
       stream  streamed completions of 64 tokens: tokens/s; every event is counted
       chat    streamed chats of 64 tokens: tokens/s
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from startup import COMMAND, free_port, healthy

TOKENS = 64
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Task:
    path: str
    max_tokens: int
    stream: bool


TASKS = {
    "short": Task("/v1/completions", 1, False),
    "whole": Task("/v1/completions", TOKENS, False),
    "stream": Task("/v1/completions", TOKENS, True),
    "chat": Task("/v1/chat/completions", TOKENS, True),
}


def request_bytes(task: Task, number: int) -> bytes:
    """Each client asks its own question, so that nothing but its beginning can come out of a cache."""
    body: dict[str, object] = {
        "max_tokens": task.max_tokens,
        "stream": task.stream,
        "temperature": 0,
        "ignore_eos": True,
    }
    text = f"{number:04d}: what is the time?"
    if task.path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    data = json.dumps(body).encode()
    lines = [
        f"POST {task.path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


@dataclass
class Count:
    requests: int = 0
    events: int = 0
    seconds: float = 0.0
    latency: float = 0.0  # summed over requests
    first: float = 0.0  # summed seconds to the first byte of the body


class Connection:
    """One keep-alive connection; reads just enough HTTP to know where an answer ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, request: bytes, count: Count) -> None:
        begin = time.perf_counter()
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {head[:80]!r}")
        lower = head.lower()
        if b"content-length:" in lower:
            length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
            await self._reader.readexactly(length)
            count.first += time.perf_counter() - begin
        else:
            await self._chunks(count, begin)
        count.requests += 1
        count.latency += time.perf_counter() - begin

    async def _chunks(self, count: Count, begin: float) -> None:
        waiting = True
        while size := int(await self._reader.readline(), 16):
            data = await self._reader.readexactly(size + 2)
            if waiting:
                count.first += time.perf_counter() - begin
                waiting = False
            count.events += data.count(b"data: {")
        await self._reader.readline()


async def load(port: int, task: Task, clients: int, seconds: float) -> Count:
    """Each client asks again as soon as it is answered, until the time is over."""
    count = Count()
    end = time.perf_counter() + seconds
    begin = time.perf_counter()

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connection = Connection(reader, writer)
        request = request_bytes(task, number)
        while time.perf_counter() < end:
            await connection.ask(request, count)
        writer.close()

    await asyncio.gather(*map(client, range(clients)))
    count.seconds = time.perf_counter() - begin
    return count


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def start_server(arguments: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", "--port", str(port), *arguments], stdout=subprocess.DEVNULL
    )
    while not healthy(f"http://127.0.0.1:{port}"):
        if server.poll() is not None:
            raise RuntimeError("the server ended before it was ready")
        time.sleep(0.05)
    return server, port


def measure(server: subprocess.Popen[bytes], port: int, name: str, clients: int, seconds: float) -> dict[str, object]:
    task = TASKS[name]
    asyncio.run(load(port, task, min(clients, 4), 1.0))  # warm
    processes = {
        "api": server.pid,
        **{f"engine {n}" if n else "engine": pid for n, pid in enumerate(children(server.pid))},
    }
    before = {what: cpu_seconds(pid) for what, pid in processes.items()}
    own = time.process_time()
    count = asyncio.run(load(port, task, clients, seconds))
    used = {what: (cpu_seconds(pid) - before[what]) / count.seconds for what, pid in processes.items()}
    used["client"] = (time.process_time() - own) / count.seconds
    tokens = count.requests * task.max_tokens
    return {
        "task": name,
        "clients": clients,
        "requests_per_s": round(count.requests / count.seconds, 1),
        "tokens_per_s": round(tokens / count.seconds, 1),
        "events_per_s": round(count.events / count.seconds, 1),
        "mean_latency_ms": round(1e3 * count.latency / count.requests, 2),
        "mean_first_byte_ms": round(1e3 * count.first / count.requests, 2),
        "cores_used": {what: round(value, 2) for what, value in used.items()},
        "settings": asdict(task),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mock", help="mock, default, or what `hotswap serve` takes")
    parser.add_argument("--clients", default="1,16,64")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, port = start_server(server_arguments(options.model, Path(folder)))
        try:
            print(f"load average {os.getloadavg()[0]:.2f}, {len(os.sched_getaffinity(0))} cores")
            for _ in range(options.reps):
                for name in options.tasks.split(","):
                    for clients in map(int, options.clients.split(",")):
                        row = measure(server, port, name, clients, options.seconds)
                        print(json.dumps(row), flush=True)
                        if options.out is not None:
                            with options.out.open("a") as file:
                                file.write(json.dumps(row) + "\n")
        finally:
            server.terminate()
            server.wait()


def server_arguments(model: str, folder: Path) -> list[str]:
    if model == "default":
        return []
    if model != "mock":
        return [model]
    from hotswap.core.testing.scripted_model import PLUGIN, make_scripted_model

    return [
        str(make_scripted_model(folder, {})),
        "--plugin",
        f"{PLUGIN},instant=72",
        "--num-gpu-blocks-override",
        "65536",
    ]


if __name__ == "__main__":
    main()
