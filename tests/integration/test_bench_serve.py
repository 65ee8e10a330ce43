"""`hotswap bench serve` over real sockets: our server with steps of a known length, and a foreign one of thirty lines."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.core.trace import TraceRow, read_trace, write_trace
from hotswap.server.cli.main import main

STEP = 0.03
Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """bench(url, flags...) -> (exit status, the JSON document); flags are split at spaces"""

    def run(url: str, *flags: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "out.json"
        path.unlink(missing_ok=True)
        words = [word for flag in flags for word in flag.split()]
        status = main(["bench", "serve", "--url", url, "--json", str(path), *words])
        return status, json.loads(path.read_text()) if path.exists() else {}

    return run


def engine(step_seconds: float = 0.0, **settings: Any) -> FakeEngine:
    return FakeEngine(lambda prompt, choice: [80] * 200, step_seconds=step_seconds, **settings)


# Our server.


def test_times_are_those_of_the_steps(live: Callable[..., Any], bench: Bench) -> None:
    """Each token takes one step of 30 ms: so does the first. A loaded machine is slower, never faster."""
    server = live(engine(STEP))
    flags = (
        "--num-requests 6 --input-len 20 --output-len 8 --request-rate 20 --arrival uniform --slo ttft:20s --warmup 2"
    )
    status, found = bench(server.url, flags, "--save-requests")
    results = found["results"]
    assert status == 0 and results["num_completed"] == 6 and results["errors"] == {}
    assert results["ttft"]["min"] >= STEP and results["ttft"]["p50"] < results["e2e"]["p50"] / 2
    # A first chunk that is read late makes the time after it look shorter: only what starts at the sending is bounded.
    assert results["tpot"]["p50"] >= STEP * 0.5 and STEP * 0.5 <= results["itl"]["p50"] < results["e2e"]["p50"] / 3
    assert results["itl"]["count"] == 6 * 7
    assert results["e2e"]["min"] >= 8 * STEP
    for request in found["requests"]:
        assert request["ttft"] + sum(request["itl"]) == pytest.approx(request["e2e"], abs=1e-9)
    assert (results["prompt_tokens"], results["output_tokens"]) == (120, 48), "by our usage, and as planned"
    assert results["counted_by"] == {"usage": 6} and results["goodput"]["share"] == 1.0
    assert results["duration"] >= 5 / 20 + 8 * STEP
    assert results["output_throughput"] == pytest.approx(48 / results["duration"])
    assert results["peak_concurrency"] >= 3, "8 steps of 30 ms, one more every 50 ms"
    assert found["workload"]["planned_rate"] == pytest.approx(20)
    assert found["server"]["software"].startswith("hotswap") and found["server"]["max_model_len"] == 256
    assert "prompt lengths are exact" in found["notes"][0]
    assert len(server.engine.requests) >= 6 + 2


def test_concurrency_is_limited_and_the_wait_is_told(live: Callable[..., Any], bench: Bench) -> None:
    server = live(engine(0.01))
    status, found = bench(server.url, "--num-requests 6 --input-len 5 --output-len 4 --max-concurrency 2 --no-progress")
    results = found["results"]
    assert status == 0 and results["peak_concurrency"] == 2
    assert results["start_delay"]["max"] >= 0.06, "the third pair waits for two answers of four steps"
    assert results["e2e"]["min"] >= 0.04


def test_conversations_hold_their_answers(live: Callable[..., Any], bench: Bench) -> None:
    server = live(engine())
    status, found = bench(server.url, "--num-requests 4 --turns 2 --input-len 16 --output-len 4")
    assert status == 0 and found["results"]["prompt_tokens"] == 2 * (16 + 36)
    assert found["results"]["cached_tokens"] >= 2 * 16, "the second turn finds the first one in the prefix cache"
    later = [r.prompt_token_ids for r in server.engine.requests if len(r.prompt_token_ids) == 36]
    assert len(later) == 2 and all(ids[16:20] == [80] * 4 for ids in later)


@pytest.mark.parametrize("turns", [1, 2])
def test_chat_lengths_count_the_template(live: Callable[..., Any], bench: Bench, turns: int) -> None:
    server = live(engine())
    words = f"--endpoint chat --num-requests 4 --turns {turns} --input-len 40 --output-len 4 --shared-prefix-len 50"
    status, found = bench(server.url, words)
    assert status == 0 and found["results"]["errors"] == {}
    assert "fitted to the planned length" in found["notes"][0]
    planned = found["workload"]["planned_prompt_tokens"]
    assert abs(found["results"]["prompt_tokens"] - planned) <= 4 * 6, (
        "a word of the byte tokenizer has up to nine tokens"
    )


def test_a_trace_with_everything(live: Callable[..., Any], bench: Bench, tmp_path: Path) -> None:
    server = live(engine())
    trace, sent = tmp_path / "t.jsonl", tmp_path / "sent.jsonl"
    rows = [
        TraceRow(0.0, 20, 4, session="s", user="alice"),
        TraceRow(0.01, 40, 4, session="s", user="alice"),
        TraceRow(0.2, 30, 3, prefix="faq", prefix_tokens=24, priority=5),
    ]
    write_trace(trace, rows)
    status, found = bench(server.url, "--trace", str(trace), "--save-trace", str(sent), "--trace-speed", "2")
    assert status == 0 and found["results"]["prompt_tokens"] == 90
    played = read_trace(sent)
    assert [(r.prompt_tokens, r.output_tokens, r.session, r.user, r.prefix_tokens) for r in played] == [
        (20, 4, "s", "alice", 0),
        (40, 4, "s", "alice", 0),
        (30, 3, "", "", 24),
    ]
    assert played[2].arrival >= 0.05
    first, second = (r for r in server.engine.requests if r.user == "alice" and len(r.prompt_token_ids) >= 20)
    assert second.prompt_token_ids[:20] == first.prompt_token_ids


def test_ignore_eos_is_sent_where_it_is_taken(live: Callable[..., Any], bench: Bench) -> None:
    server = live(FakeEngine(lambda prompt, choice: [80, 81]))
    status, found = bench(server.url, "--num-requests 3 --input-len 5 --output-len 9 --ignore-eos")
    assert status == 0 and server.engine.requests[-1].sampling.ignore_eos
    assert any("does not ignore it" in warning for warning in found["warnings"]), "the fake engine stops all the same"


def test_failures_are_counted_by_kind(
    live: Callable[..., Any], bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    server = live(engine())
    server.engine.fail_after = 3
    status, found = bench(server.url, "--num-requests 3 --input-len 5 --output-len 9")
    assert status == 1 and found["results"]["errors"] == {"error event": 3}
    assert "3 of 3 requests failed: error event" in capsys.readouterr().err


def test_a_dataset_and_a_picture(live: Callable[..., Any], bench: Bench, tmp_path: Path) -> None:
    server = live(engine())
    (tmp_path / "d.jsonl").write_text('"hello"\n{"prompt": "you", "output_tokens": 2}\n')
    picture = tmp_path / "p.png"
    status, found = bench(
        server.url, "--dataset", str(tmp_path / "d.jsonl"), "--output-len", "5", "--picture", str(picture)
    )
    assert status == 0 and found["results"]["output_tokens"] == 10
    assert picture.stat().st_size > 10_000


def test_what_cannot_be_asked(live: Callable[..., Any], bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    server = live(engine())
    assert bench(server.url, "--model", "other")[0] == 2
    assert "--model other: this server has 'tiny'" in capsys.readouterr().err
    assert bench(server.url, "--input-len", "300")[0] == 2
    assert "window of 256" in capsys.readouterr().err
    assert bench(server.url, "--extra-body", "[]")[0] == 2
    assert bench("127.0.0.1:9")[0] == 1
    assert "no server answers" in capsys.readouterr().err
    assert main(["bench", "serve"]) == 2


def test_a_key_is_needed_and_taken(live: Callable[..., Any], bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from pydantic import SecretStr

    monkeypatch.delenv("HOTSWAP_API_KEY", raising=False)
    server = live(engine(), api_key=[SecretStr("k")])
    assert bench(server.url, "--num-requests", "1")[0] == 1
    status, found = bench(server.url, "--num-requests 1 --input-len 5 --output-len 3 --api-key k")
    assert status == 0 and "api_key" not in found["settings"]
    monkeypatch.setenv("HOTSWAP_API_KEY", "k")
    assert bench(server.url, "--num-requests 1 --input-len 5 --output-len 3")[0] == 0


# A foreign server: no /v1/models, no /tokenize, no usage, refuses what it does not know, and sends odd but legal chunks.


async def foreign(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        return
    data = b""
    while True:
        message = await receive()
        data += message.get("body", b"")
        if not message.get("more_body"):
            break

    async def reply(status: int, kind: str, *pieces: bytes) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]})
        for piece in pieces:
            await asyncio.sleep(0.01)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    if scope["path"] != "/v1/completions":
        return await reply(404, "text/plain", b"not found")
    body = json.loads(data)
    if body.keys() - {"model", "prompt", "max_tokens", "temperature", "stream"}:
        return await reply(422, "application/json", b'{"detail": "unknown field"}')
    if "boom" in str(body["prompt"]):
        return await reply(200, "text/event-stream", b'data: {"choices":[{"text":"a"}]}\n\n')
    await reply(
        200,
        "text/event-stream; charset=utf-8",
        b": hello\r\n\r\n",
        b'data: {"id":1,"choices":[]}\r\n\r\ndata: {"choices":[{"index":0,"text":""}]}\r\n\r\n',
        b'data:{"choices":[{"index":0,"text":"one"}]}\r\n\r\ndata: {"choices":[{"ind',
        b'ex":0,"text":"two \xc3',
        b'\xa4"}],"usage":null}\r\n\r\n',
        b'data: {"choices":[{"index":0,"text":null,"finish_reason":"length"}]}\n',
    )


@pytest.fixture(scope="module")
def foreign_url() -> Iterator[str]:
    import uvicorn

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(foreign, lifespan="off", log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def test_a_foreign_server(foreign_url: str, bench: Bench) -> None:
    flags = "--model theirs --num-requests 5 --input-len 12 --output-len 2 --ignore-eos --max-concurrency 3"
    status, found = bench(foreign_url, flags)
    results = found["results"]
    assert status == 0 and results["num_completed"] == 5 and results["errors"] == {}
    assert (results["output_tokens"], results["counted_by"]) == (10, {"chunks": 5})
    assert results["prompt_tokens"] == 60, "as planned: nobody counted"
    assert results["ttft"]["min"] >= 0.03 and results["e2e"]["min"] >= 0.06 and results["itl"]["count"] == 5
    assert found["server"]["extras"] == {"include_usage": False, "ignore_eos": False}
    notes = "\n".join(found["notes"])
    assert (
        "one taken for one token" in notes and "does not take ignore eos" in notes and "does not take include" in notes
    )
    assert any("chunks were counted as tokens" in warning for warning in found["warnings"])


def test_a_foreign_server_needs_a_name(foreign_url: str, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(foreign_url, "--num-requests", "1")[0] == 1
    assert "--model" in capsys.readouterr().err


def test_a_stream_that_stops_is_an_error(foreign_url: str, bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('"boom"\n"fine"\n')
    status, found = bench(foreign_url, "--model", "theirs", "--dataset", str(tmp_path / "d.jsonl"))
    assert status == 0 and found["results"]["errors"] == {"broken stream": 1}
    assert found["results"]["num_completed"] == 1


# A real engine, without HTTP.


def test_throughput_of_a_real_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hotswap.core.testing.tiny_models import make_tiny_model

    model = make_tiny_model(tmp_path / "model")
    flags = (
        "--num-requests 8 --input-len uniform:8,24 --shared-prefix-len 32 --output-len 6 --num-gpu-blocks-override 200"
    )
    result, sent = tmp_path / "out.json", tmp_path / "sent.jsonl"
    words = [str(model), *flags.split(), "--max-concurrency", "4", "--json", str(result), "--save-trace", str(sent)]
    assert main(["bench", "throughput", *words]) == 0, capsys.readouterr().err
    found = json.loads(result.read_text())
    assert found["results"]["output_tokens"] == 48 and found["results"]["errors"] == {}
    figures = found["engine"]
    assert figures["steps"] > 6 and figures["scheduled_tokens"] > 0 and figures["prefix_hits"] >= 4 * 32
    assert figures["plugins"]["policy"] == "fcfs" and figures["info"]["num_blocks"] == 200
    assert len(read_trace(sent)) == 8
