"""Group P of the bug bank: start-up and the command line. Real processes, as an operator starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from hotswap.core.testing.tiny_models import make_tiny_model

COMMAND = "import sys; from hotswap.server.cli import main; sys.exit(main(sys.argv[1:]))"
MARK = "HOTSWAP_TEST_MARK"


@dataclass
class Run:
    """A `hotswap` process, and every process that it starts: known by a mark in their environment."""

    words: list[str]
    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.out = self.folder / f"out-{self.mark}"
        self.started = time.monotonic()
        environment = {**os.environ, MARK: self.mark, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
        with self.out.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, *self.words], stdout=stream, stderr=subprocess.STDOUT, env=environment
            )

    def text(self) -> str:
        return self.out.read_text()

    def end(self, limit: float = 10.0) -> tuple[int, str, float]:
        """(exit status, its one line, seconds)"""
        limit *= crowding()
        status = self.process.wait(limit + 60)
        seconds = time.monotonic() - self.started
        text = self.text()
        assert seconds < limit, f"{seconds:.1f} s: {text}"
        assert "Traceback" not in text
        lines = [line for line in text.splitlines() if not line.startswith("hotswap: ") or ": error:" in line]
        assert len(lines) == 1, text
        self.assert_no_orphan()
        return status, lines[0], seconds

    def pids(self) -> set[int]:
        """Of this run's processes that live."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    marked = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                    zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                except OSError:
                    continue  # it ended, or is not ours to look at
                if marked and not zombie:
                    found.add(int(entry.name))
        return found

    def assert_no_orphan(self) -> None:
        end = time.monotonic() + 3
        while self.pids():
            assert time.monotonic() < end, f"left behind: {self.pids()}"
            time.sleep(0.05)

    def kill(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def crowding() -> float:
    """How many times longer things take than on a quiet machine: runnable processes for each processor, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def refuse(folder: Path, *words: str, limit: float = 10.0) -> tuple[int, str]:
    run = Run(["serve", *words, "--port", str(free_port())], folder)
    try:
        status, line, _ = run.end(limit)
    finally:
        run.kill()
    assert line.startswith("hotswap: error: ")
    return status, line.removeprefix("hotswap: error: ")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


# P01


def test_p01_no_such_folder(tmp_path: Path) -> None:
    status, line = refuse(tmp_path, "./no-such-folder")
    assert status == 1 and line == "./no-such-folder: no such file or folder"


def test_p01_no_config(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(8))
    status, line = refuse(tmp_path, str(tmp_path / "model"))
    assert status == 1 and "config.json" in line and str(tmp_path / "model") in line


def test_p01_unknown_architecture(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config.update(architectures=["FooForCausalLM"], model_type="foo")
    (model / "config.json").write_text(json.dumps(config))
    status, line = refuse(tmp_path, str(model))  # transformers is asked whether it knows it: two large imports
    assert status == 1 and "FooForCausalLM" in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-model-len", "0"], "--max-model-len: Input should be greater than or equal to 1, got 0"),
        (["-tp", "3"], "--tensor-parallel-size above 1: more than one device is not in this version yet; use 1"),
        (["--tp", "3"], "unknown flag --tp: here it is --tensor-parallel-size (a flag of SGLang and lmdeploy)"),
        (["--max-modl-len", "8"], "unknown flag --max-modl-len; the nearest one is --max-model-len"),
        (["--max-num-seqs", "many"], "argument --max-num-seqs: invalid int value: 'many'"),
    ],
)
def test_p01_bad_flags(tmp_path: Path, tiny: Path, words: list[str], expected: str) -> None:
    status, line = refuse(tmp_path, str(tiny), *words)
    assert status == 2 and line.startswith(expected)


@pytest.mark.parametrize("order", ["before", "after"])
def test_p01_flags_beat_the_file_in_any_order(tmp_path: Path, tiny: Path, order: str) -> None:
    """The file asks for what cannot be; only a flag that beats it lets the start get to the missing model."""
    file = tmp_path / "hotswap.yaml"
    file.write_text(f"model: {tiny}\ntensor-parallel-size: 4\nmax-num-seqs: 4\n")
    flags = ["-tp", "1", "--model", "./no-such-folder"]
    config = ["--config", str(file)]
    status, line = refuse(tmp_path, *(flags + config if order == "before" else config + flags))
    assert status == 1 and line == "./no-such-folder: no such file or folder"


def test_p01_the_file_is_heard(tmp_path: Path, tiny: Path) -> None:
    file = tmp_path / "hotswap.yaml"
    file.write_text(f"model: {tiny}\ntensor-parallel-size: 4\n")
    status, line = refuse(tmp_path, "--config", str(file))
    assert status == 2 and "--tensor-parallel-size above 1" in line


def test_p01_a_bad_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "hotswap.yaml"
    file.write_text("max-num-seqs: many\n")
    status, line = refuse(tmp_path, "--config", str(file))
    assert status == 2 and line == f"--config {file}: max-num-seqs: a whole number is needed, got 'many'"


# P02


def test_p02_an_occupied_port_is_told_at_once(tmp_path: Path, tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = Run(["serve", str(tiny), "--port", str(port)], tmp_path)
        try:
            status, line, _ = run.end(limit=5.0)
        finally:
            run.kill()
    assert status == 1
    assert line.startswith(f"hotswap: error: cannot listen on 127.0.0.1 port {port}: address already in use")


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[tuple[Run, int, list[int]]]:
    """A server that was probed from its first moment until it was ready: (run, port, status codes; 0 is refused)."""
    port = free_port()
    folder = tmp_path_factory.mktemp("probed")
    run = Run(["serve", str(tiny), "--port", str(port), "--num-gpu-blocks-override", "100"], folder)
    codes: list[int] = []
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while not codes or codes[-1] != 200:
                assert run.process.poll() is None and time.monotonic() - run.started < 60 * crowding(), run.text()
                try:
                    codes.append(client.get("/health").status_code)
                except httpx.ConnectError:
                    codes.append(0)
                time.sleep(0.02)
        yield run, port, codes
    finally:
        run.kill()


def test_p02_a_probe_during_load_is_refused_or_503(probed: tuple[Run, int, list[int]]) -> None:
    _, _, codes = probed
    assert set(codes) == {0, 503, 200}, "refused before the port is bound, 503 while loading, 200 from then on"
    assert codes == sorted(codes, key=[0, 503, 200].index)


def test_p02_no_internal_port_can_clash(probed: tuple[Run, int, list[int]]) -> None:
    """The processes of a server listen on one TCP port, the one that was asked for: there is no other to clash with."""
    run, port, _ = probed
    pids = run.pids()
    assert len(pids) >= 2
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue  # closed meanwhile
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in sockets:  # listening
                ports.add(int(columns[1].rpartition(":")[2], 16))
    assert ports == {port}


def test_p02_a_second_server_on_that_port_is_refused(probed: tuple[Run, int, list[int]], tmp_path: Path) -> None:
    first, port, _ = probed
    second = Run(["serve", "./no-such-folder", "--port", str(port)], tmp_path)
    try:
        status, line, _ = second.end(limit=5.0)
    finally:
        second.kill()
    assert status == 1 and "already in use" in line
    assert first.process.poll() is None
