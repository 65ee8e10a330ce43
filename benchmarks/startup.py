#!/usr/bin/env python3
"""Seconds from the command `hotswap serve` to the first token of a streamed chat, the model already fetched.

    python benchmarks/startup.py [--runs 3]

Uses the `hotswap` of this Python's environment. The client polls /health and asks as soon as it says 200.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

COMMAND = "import sys; from hotswap.server.cli.main import main; sys.exit(main(sys.argv[1:]))"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:  # not listening yet, or too busy to answer
        return False


def measure() -> tuple[float, float]:
    """(seconds to ready, seconds to the first token)."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    begin = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not healthy(url):
            if server.poll() is not None:
                raise RuntimeError("the server ended before it was ready")
            time.sleep(0.02)
        ready = time.perf_counter() - begin
        body = {"messages": [{"role": "user", "content": "Say hello."}], "stream": True, "max_tokens": 8}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as stream:
            for line in stream:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    return ready, time.perf_counter() - begin
        raise RuntimeError("the stream held no token")
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    for run in range(parser.parse_args().runs):
        ready, first = measure()
        print(
            f"run {run + 1}: ready after {ready:.2f} s, first token after {first:.2f} s (load {os.getloadavg()[0]:.2f})"
        )


if __name__ == "__main__":
    main()
