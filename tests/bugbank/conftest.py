"""Fixtures of the bug bank: scripted engines in process, the application over a fake engine, and one real server."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hotswap.core.testing.scripted_model import PLUGIN, Part, make_scripted_model
from hotswap.core.testing.tiny_models import make_tiny_model
from hotswap.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import httpx

    from hotswap.core.engine.llm import LLM


def _unit_fixtures() -> Any:
    """The application in process is the unit tests' fixture; a conftest is not importable by name."""
    path = Path(__file__).parent.parent / "unit" / "conftest.py"
    spec = importlib.util.spec_from_file_location("bugbank_unit_fixtures", path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_unit = _unit_fixtures()
make_api, api, sse = _unit.make_api, _unit.api, _unit.sse

SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 49,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 8,
}
COMMAND = "import sys; from hotswap.server.cli import main; sys.exit(main(sys.argv[1:]))"
EMOJI = "é😀"
FALSE_STARTS = "a\nb\n\nUs\n\nUx\n\n\nUse\n\nUser\n\nUser: more"
LONG = 900  # tokens

# What the server's model says, by the first character of the prompt. Prompts are one token long unless said otherwise.
SERVER_PARTS: dict[str | int, Any] = {
    "E": EMOJI,
    "F": FALSE_STARTS,
    "G": "ab<cd|ef>gh",
    "L": [68 + n % 26 for n in range(LONG)],
    "H": "hello",
    "S": [72, 73, 2, 74, 75],  # e f <|im_start|> g h, then the end
    "T": [{"base": 0.0}] * 24,  # flat: every token is as likely
    "I": [{"base": "-inf", "80": 3.0, "81": 2.0}, {"base": 0.0, "82": 1.0, "83": "-inf"}],
    "P": Part(rows=[68, 69, 70], prompt_tokens=20),
}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The byte tokenizer of every model here."""
    from hotswap.core.testing.fake_engine import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture
def make_llm(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    """make_llm(parts, folder settings: model={...}, engine settings...): an offline engine over the scripted model."""
    from hotswap import LLM as make

    engines: list[LLM] = []

    def build(
        parts: Mapping[str | int, Any] | None = None, model: Mapping[str, Any] | None = None, **settings: Any
    ) -> LLM:
        folder = make_scripted_model(tmp_path / f"scripted{len(engines)}", parts, **(model or {}))
        engines.append(make(str(folder), plugins=[PLUGIN], **{**SMALL, **settings}))
        return engines[-1]

    yield build
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a real, tiny network."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def oracle(tiny_llama: Path) -> Any:
    """transformers' forward of it, float32, no cache."""
    from hotswap.core.testing.oracle import transformers_model

    return transformers_model(tiny_llama)


@pytest.fixture
def make_tiny(tiny_llama: Path) -> Iterator[Callable[..., LLM]]:
    """make_tiny(engine settings...): an offline engine over the tiny network."""
    from hotswap import LLM as make

    engines: list[LLM] = []

    def build(**settings: Any) -> LLM:
        engines.append(make(str(tiny_llama), **{**SMALL, **settings}))
        return engines[-1]

    yield build
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="session")
def plain_tiny(tiny_llama: Path) -> Iterator[LLM]:
    """The undisturbed run: room for everything, whole prompts in one step, no prefix cache, one step at a time."""
    from hotswap import LLM as make

    settings: dict[str, Any] = {"num_gpu_blocks_override": 600, "max_num_batched_tokens": 256, "max_num_seqs": 16}
    engine = make(str(tiny_llama), block_size=4, enable_prefix_caching=False, async_scheduling=False, **settings)
    yield engine
    engine.shutdown()


class Served:
    """A `hotswap serve` process over the scripted model."""

    def __init__(self, folder: Path) -> None:
        import httpx

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log"
        model = make_scripted_model(folder / "model", SERVER_PARTS, default="ok", max_model_len=1024)
        flags = ["--block-size", "4", "--num-gpu-blocks-override", "512", "--max-num-seqs", "8"]
        flags += ["--max-num-batched-tokens", "16", "--served-model-name", "scripted", "--plugin", PLUGIN]
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "serve", str(model), "--port", str(self.port), *flags],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.client = httpx.Client(base_url=self.url, timeout=30)
        end = time.monotonic() + 120
        while " serves scripted on " not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def metrics(self) -> dict[tuple[str, str], float]:
        """(name without namespace, value of finished_reason, mode, reason or "") -> value."""
        from prometheus_client.parser import text_string_to_metric_families

        found = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                labels = sample.labels
                extra = labels.get("finished_reason") or labels.get("mode") or labels.get("reason") or ""
                found[sample.name.removeprefix("hotswap:"), extra] = sample.value
        return found

    def is_idle(self) -> bool:
        values = self.metrics()
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(values[name, ""] == 0 for name in gauges)

    def ask(self, path: str, body: Mapping[str, Any]) -> socket.socket:
        """Sends a request and leaves the connection open."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that need a socket, a real engine process, or the official client."""
    server = Served(tmp_path_factory.mktemp("served"))
    yield server
    server.client.close()
    server.process.terminate()
    assert server.process.wait(30) == 0, server.log.read_text()
    assert "Traceback" not in server.log.read_text(), server.log.read_text()


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.02)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], float], None]:
    return wait_until


@pytest.fixture
def run() -> Callable[..., Any]:
    """run(llm, prompts, params or fields...): outputs in order, without a progress bar."""
    from hotswap import SamplingParams

    def generate(llm: LLM, prompts: Sequence[Any], params: Any = None, **fields: Any) -> Any:
        chosen = params if params is not None else SamplingParams(**{"temperature": 0.0, "max_tokens": 32, **fields})
        return llm.generate(list(prompts), chosen, use_tqdm=False)

    return generate


class Driver:
    """An offline engine stepped by hand: what each engine request got, and that each ends once."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.core: Any = llm._engine.core
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.ends: dict[int, list[str]] = {}
        self.errors: dict[int, str | None] = {}
        self.cached: dict[int, int] = {}

    def add(self, ids: list[int], *, cache_salt: str | None = None, **fields: Any) -> list[int]:
        """Queues a request; the ids of its choices."""
        from hotswap import SamplingParams

        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **fields})
        requests = self.llm._front.inputs.process(list(ids), params, cache_salt=cache_salt)
        for request in requests:
            self.tokens[request.request_id], self.ends[request.request_id] = [], []
            self.logprobs[request.request_id] = []
            refusal = self.core.add_request(request)
            if refusal is not None:
                self._take([refusal])
        return [request.request_id for request in requests]

    def step(self) -> list[Any]:
        updates: list[Any] = self.core.step()
        self._take(updates)
        return updates

    def abort(self, *request_ids: int) -> None:
        self.core.abort(request_ids)

    def drain(self) -> None:
        """Until nothing is left; then the pool is audited."""
        for _ in range(5000):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work()
        assert all(len(ends) == 1 for ends in self.ends.values()), self.ends
        self.llm.check_integrity()
        assert self.llm.stats.kv_usage == 0.0
        assert self.llm.stats.num_running == self.llm.stats.num_waiting == 0

    def _take(self, updates: list[Any]) -> None:
        for update in updates:
            assert not self.ends[update.request_id], f"request {update.request_id} speaks after its end"
            self.tokens[update.request_id] += update.new_token_ids
            self.logprobs[update.request_id] += update.logprobs or []
            self.cached[update.request_id] = update.num_cached_tokens
            if update.finish_reason is not None:
                self.ends[update.request_id].append(update.finish_reason)
                self.errors[update.request_id] = update.error


@pytest.fixture
def drive() -> type[Driver]:
    return Driver


@pytest.fixture
def preempting() -> Callable[[int], str]:
    """preempting(n): the --plugin value of a scheduler that takes every request it may out of the batch, once, as soon as
    n of its tokens are computed."""
    path = Path(__file__).with_name("preempting_scheduler.py")
    return lambda after: f"{path},after={after}"
