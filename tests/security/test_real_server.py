"""S-03, S-23, S-26, S-51 on the real command with a real engine process; one server for all of them."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hotswap.core.testing.tiny_models import make_tiny_model

COMMAND = "import sys; from hotswap.server.cli import main; sys.exit(main(sys.argv[1:]))"
KEY, ADMIN_KEY = "key-of-the-test", "admin-key-of-the-test"
FLAGS = [
    "--num-gpu-blocks-override",
    "200",
    "--served-model-name",
    "tiny",
    "--enable-log-requests",
    "--log-level",
    "debug",
]
LISTENING = "0A"  # in /proc/net/tcp


class Served:
    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log, self.out = folder / "log", folder / "out"
        self.temporary = folder / "t"
        self.temporary.mkdir(mode=0o755)
        model = make_tiny_model(folder / "model")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TMPDIR": str(self.temporary),
            "HOTSWAP_API_KEY": KEY,
            "HOTSWAP_ADMIN_KEY": ADMIN_KEY,
        }
        with self.log.open("wb") as log, self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "serve", str(model), "--port", str(self.port), *FLAGS],
                stdout=out,
                stderr=log,
                env=environment,
                umask=0o000,  # a careless operator's
            )
        end = time.monotonic() + 120
        while " serves tiny on " not in self.out.read_text():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.1)

    def pids(self) -> list[int]:
        """The server and everything that it started."""
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").iterdir():
                todo += [int(child) for child in (task / "children").read_text().split()]
        return found

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}", **headers}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    import tempfile

    # Not pytest's own folder: the path of a unix socket is at most 107 bytes long.
    with tempfile.TemporaryDirectory(prefix="hs") as folder:
        server = Served(Path(folder))
        yield server
        server.process.kill()
        server.process.wait()


def socket_inodes(pids: list[int]) -> set[str]:
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target.startswith("socket:"):
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    return inodes


def listeners(inodes: set[str], pid: int) -> list[tuple[str, int]]:
    """(address in hexadecimal, port) of every TCP and UDP socket of these inodes that takes what comes from outside."""
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == LISTENING or table.startswith("udp")):
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def test_s03_only_the_http_port_listens(served: Served) -> None:
    pids = served.pids()
    assert len(pids) >= 2, "the engine is a process of its own"
    assert listeners(socket_inodes(pids), served.process.pid) == [("0100007F", served.port)]


def test_s03_the_check_can_fail() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        found = listeners(socket_inodes([os.getpid()]), os.getpid())
        assert ("0100007F", other.getsockname()[1]) in found


def test_s03_the_engine_s_sockets_are_private(served: Served) -> None:
    folders = [path for path in served.temporary.iterdir() if path.name.startswith("hotswap-")]
    assert len(folders) == 1
    mode = folders[0].stat()
    assert stat.S_IMODE(mode.st_mode) == 0o700 and mode.st_uid == os.getuid()
    sockets = list(folders[0].iterdir())
    assert sorted(path.name for path in sockets) == ["in", "out"]
    assert all(stat.S_ISSOCK(path.stat().st_mode) for path in sockets)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_s51_a_salt_reaches_the_scheduler_on_every_route(served: Served, path: str, stream: bool) -> None:
    text = f"the same long prompt of two tenants, {path}, {stream}, and some more words of it"

    def cached(salt: str | None) -> int:
        prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
        body: dict[str, Any] = {**prompt, "max_tokens": 1, "cache_salt": salt, "stream": stream}
        if not stream:
            return int(served.post(path, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        body["stream_options"] = {"include_usage": True}
        events = [line[6:] for line in served.post(path, body).text.split("\n\n") if line.startswith("data: {")]
        return int(json.loads(events[-1])["usage"]["prompt_tokens_details"]["cached_tokens"])

    first, second = (f"{tenant}/{path[4:8]}/{stream}" for tenant in "ab")
    assert [cached(first), cached(second)] == [0, 0]
    assert cached(first) > 16 and cached(second) > 16


def test_s23_the_policy_is_swapped_by_the_admin_only(served: Served) -> None:
    body = {"name": "priority"}
    assert served.post("/admin/plugins/policy", body).status_code == 403
    assert served.post("/admin/plugins/policy", body, **{"x-admin-key": KEY}).status_code == 403
    assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "priority": 2}).status_code == 400
    done = served.post("/admin/plugins/policy", body, **{"x-admin-key": ADMIN_KEY})
    assert done.status_code == 200 and done.json()["policy"] == "priority", done.text
    assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "priority": 2}).status_code == 200
    refused = served.post("/admin/plugins/policy", {"name": "no_such_policy"}, **{"x-admin-key": ADMIN_KEY})
    assert refused.status_code == 400 and "no_such_policy" in refused.json()["error"]["message"], refused.text
    rows = httpx.get(
        f"{served.url}/admin/plugins", headers={"authorization": f"Bearer {KEY}", "x-admin-key": ADMIN_KEY}
    ).json()["plugins"]
    assert any(row["kind"] == "policy" and row["name"] == "priority" and row["state"] == "active" for row in rows)
    reset = served.post("/admin/reset_prefix_cache", {}, **{"x-admin-key": ADMIN_KEY})
    assert reset.status_code == 200 and reset.json() == {"reset": True}
    assert served.post("/admin/plugins/policy", {"name": "fcfs"}, **{"x-admin-key": ADMIN_KEY}).status_code == 200


def test_s26_both_processes_write_json_lines(served: Served) -> None:
    secret = "a-prompt-that-nobody-logs"
    reply = served.post("/v1/completions", {"prompt": secret, "max_tokens": 2}, **{"x-request-id": "label-of-it"})
    assert reply.status_code == 200
    served.post("/v1/completions", {"prompt": "a", "x\nforged": 1})
    time.sleep(0.2)
    text = served.log.read_text()
    own = [line for line in text.splitlines() if not line.startswith("hotswap: ")]  # the start's own words, no records
    assert len(text.splitlines()) - len(own) <= 3
    lines = [json.loads(line) for line in own]
    assert {"hotswap.engine", "hotswap.requests"} <= {line["logger"] for line in lines}
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert [line for line in lines if line.get("request_id") == "label-of-it"]
    assert secret not in text and KEY not in text and ADMIN_KEY not in text


def test_s24_the_real_engine_s_refusals_are_clean(served: Served) -> None:
    for body in (
        {"prompt": "a" * 2000},
        {"prompt": [5] * 300},
        {"prompt": "a", "logits_processors": ["nope"]},
        {"prompt": "a", "logit_bias": {"100000": 1}},
        {"prompt": "a", "min_tokens": 10**6},
    ):
        for stream in (False, True):
            reply = served.post("/v1/completions", {**body, "stream": stream})
            assert reply.status_code == 400, reply.text
            assert not re.search(r"0x[0-9a-f]{6}|/usr/|/home/|/root/|Traceback|site-packages", reply.text)
