"""`hotswap bench throughput`: everything but the engine itself."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.config import EngineConfig
from hotswap.core.errors import RequestError
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.core.trace import TraceRow, read_trace, write_trace
from hotswap.server.cli.main import main

Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(lambda prompt, choice: [80 + len(prompt) % 7] * 200, step_seconds=0.002)


@pytest.fixture
def bench(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """bench(flags...) -> (exit status, the JSON document)"""

    def start_engine(config: EngineConfig, make_manager: Callable[[], PluginManager], report: Any) -> FakeEngine:
        assert make_manager().providers("policy")
        return engine

    monkeypatch.setattr("hotswap.core.engine.start.start_engine", start_engine)

    def run(*flags: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "out.json"
        path.unlink(missing_ok=True)
        status = main(["bench", "throughput", "tiny", "--json", str(path), *flags])
        return status, json.loads(path.read_text()) if path.exists() else {}

    return run


def test_all_at_once(bench: Bench, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = bench("--num-requests", "12", "--input-len", "uniform:5,20", "--output-len", "8", "--warmup", "2")
    assert status == 0 and engine.state == "dead" and not engine.aborted
    results = found["results"]
    assert (results["num_completed"], results["output_tokens"], results["errors"]) == (12, 96, {})
    assert (
        results["prompt_tokens"]
        == found["workload"]["planned_prompt_tokens"]
        == sum(len(r.prompt_token_ids) for r in engine.requests[2:])
    )
    assert results["peak_concurrency"] == 12 and results["counted_by"] == {"engine": 12}
    assert results["itl"]["p50"] >= 0.002 and results["itl"]["count"] == 12 * 7
    assert all(r.sampling.ignore_eos and r.sampling.temperature == 0 for r in engine.requests)
    assert {"steps", "preemptions_recompute", "prefix_hits", "kv_usage_peak", "plugins"} <= found["engine"].keys()
    out = capsys.readouterr().out
    assert "output tokens/s" in out and "TTFT" in out and "prompt lengths are exact" in out


def test_the_same_seed_asks_the_same(bench: Bench, engine: FakeEngine) -> None:
    prompts = []
    for seed in ("0", "0", "1"):
        before = len(engine.requests)
        engine.state, engine._death = "ready", None
        assert bench("--num-requests", "4", "--input-len", "9", "--output-len", "2", "--seed", seed)[0] == 0
        prompts.append([r.prompt_token_ids for r in engine.requests[before:]])
    assert prompts[0] == prompts[1] != prompts[2]


def test_a_trace_is_run_at_once_or_paced(bench: Bench, engine: FakeEngine, tmp_path: Path) -> None:
    trace, sent = tmp_path / "t.jsonl", tmp_path / "sent.jsonl"
    rows = [TraceRow(0.1 * n, 20 + n, 5, prefix="p", prefix_tokens=16, user="u", priority=n) for n in range(4)]
    write_trace(trace, rows)
    flags = ("--trace", str(trace), "--save-trace", str(sent), "--save-requests")
    status, found = bench(*flags)
    assert status == 0 and found["workload"]["planned_rate"] is None
    assert [request["due"] for request in found["requests"]] == [0.0] * 4
    assert [(r.prompt_tokens, r.output_tokens, r.priority, r.user) for r in read_trace(sent)] == [
        (20 + n, 5, n, "u") for n in range(4)
    ]
    heads = {tuple(r.prompt_token_ids[:16]) for r in engine.requests}
    assert len(heads) == 1 and {r.priority for r in engine.requests} == {0}
    assert any("does not serve by priority" in note for note in found["notes"])
    engine.info.uses_priority = True
    engine.state, engine._death = "ready", None
    status, found = bench(*flags, "--paced")
    assert status == 0 and found["results"]["duration"] >= 0.3
    assert [r.priority for r in engine.requests[4:]] == [0, 1, 2, 3]
    assert [request["due"] for request in found["requests"]] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert all(request["sent"] >= request["due"] for request in found["requests"])


def test_later_turns_hold_the_real_answers(bench: Bench, engine: FakeEngine) -> None:
    status, _ = bench("--num-requests", "6", "--turns", "3", "--input-len", "6", "--output-len", "4")
    assert status == 0
    by_length = sorted((r.prompt_token_ids for r in engine.requests), key=len)
    assert [len(ids) for ids in by_length] == [6, 6, 16, 16, 26, 26]
    for later in by_length[2:]:
        earlier = next(ids for ids in by_length if len(ids) == len(later) - 10 and later[: len(ids)] == ids)
        assert later[len(earlier) : len(earlier) + 4] == [80 + len(earlier) % 7] * 4


def test_refusals_are_counted_and_fail_the_command(
    bench: Bench, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.refuse = RequestError("the queue is full", status=429)
    status, found = bench("--num-requests", "3", "--input-len", "5", "--output-len", "4")
    assert status == 1 and found["results"]["errors"] == {"refused (429)": 3}
    assert "the queue is full" in capsys.readouterr().err
    engine.state, engine._death = "ready", None
    status, found = bench("--num-requests", "3", "--input-len", "5", "--output-len", "4", "--warmup", "1")
    assert status == 1 and found == {} and "warm-up" in capsys.readouterr().err


def test_an_engine_that_dies_ends_the_run(bench: Bench, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.die("the forward pass is on fire")
    engine.state = "ready"  # as the command sees it; every request fails
    assert bench("--num-requests", "3", "--input-len", "5", "--output-len", "4") == (1, {})
    assert "on fire" in capsys.readouterr().err
    began = time.monotonic()
    assert (
        bench("--num-requests", "20", "--input-len", "5", "--output-len", "4", "--paced", "--request-rate", "1")[0] == 1
    )
    assert time.monotonic() - began < 12, "the arrivals that are still to come are not waited for"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--request-rate", "3"], "--paced"),
        (["--paced"], "--trace FILE or --request-rate"),
        (["--trace", "x", "--dataset", "y"], "--trace and --dataset"),
        (["--trace", "x", "--turns", "3", "--output-len", "5"], "--turns, --output-len: --trace says it already"),
        (["--trace", "x.jsonl"], "x.jsonl"),
        (["--save-requests"], "--json"),
        (["--num-prefixes", "2"], "--shared-prefix-len"),
        (["--burstiness", "2"], "--arrival bursty"),
        (["--slo", "soon"], "SLO"),
        (["--num-requests", "0"], "--num-requests 0"),
        (["--picture", "x.gif"], "must end in"),
        (["--json", "/nowhere/at/all/x.json"], "no such folder"),
        (["--input-len", "many"], "--input-len 'many'"),
        (["--trace-speed", "2"], "there is no --trace"),
    ],
)
def test_what_cannot_be_asked(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", *flags]) == 2
    assert words in capsys.readouterr().err


def test_the_window_is_checked(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--num-requests", "3", "--input-len", "250", "--output-len", "7")[0] == 2
    assert "window of 256 tokens" in capsys.readouterr().err


def test_ctrl_c_ends_the_run_and_keeps_what_was_measured(
    bench: Bench, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        while len(engine.requests) < 20:
            if ended.wait(0.005):
                return
        os.kill(os.getpid(), signal.SIGINT)

    ended = threading.Event()
    threading.Thread(target=interrupt).start()
    status, found = bench(
        "--paced", "--request-rate", "50", "--num-requests", "500", "--input-len", "20", "--output-len", "8"
    )
    ended.set()
    assert status == 130 and found["interrupted"] and engine.state == "dead"
    completed = found["results"]["num_completed"]
    assert 1 <= completed < 100 and found["results"]["errors"] == {}
    assert found["workload"]["num_requests"] == found["results"]["num_requests"] == completed
    assert f"interrupted: the figures are of the {completed} of 500 requests" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--save-trace", "--picture"])
def test_an_output_that_cannot_be_written_is_told_before_the_run(
    flag: str, engine: FakeEngine, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder.png"
    folder.mkdir()
    assert bench(flag, str(folder))[0] == 2
    assert f"{flag} {folder}: this is a folder" in capsys.readouterr().err
    assert not engine.requests
