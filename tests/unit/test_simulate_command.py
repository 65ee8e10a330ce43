"""`hotswap simulate`: what it prints, what it refuses, that policies differ in nothing but the policy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hotswap.core.errors import PluginError, UsageError
from hotswap.core.plugin_selection import COMMAND_LINE, CONFIG_FILE, parse
from hotswap.core.simulator.variants import policy_variants
from hotswap.core.trace import read_trace
from hotswap.plugins import BUILTIN_PLUGINS
from hotswap.server.cli.main import main

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
SPEC = "requests=80,rate=60,seed=2,prompt=uniform:20,300,output=uniform:1,80,users=3,priorities=2,shared_prefix=40"
BUSY = ["--synthetic", SPEC, "--max-num-seqs", "8", "--num-gpu-blocks-override", "120", "--max-model-len", "1500"]

LONGEST_FIRST = """
from pydantic import BaseModel
from hotswap.core.contracts import KeyedPolicy, PolicyProvider, Provider, VictimRule, hookimpl

class Options(BaseModel):
    sign: int = -1

class LongestFirst(KeyedPolicy):
    def __init__(self, options):
        super().__init__()
        self.sign = options.sign

    def key(self, view):
        return self.sign * view.num_prompt_tokens

class Last(VictimRule):
    def choose(self, candidates, num_blocks_needed):
        return candidates[-1]

@hookimpl
def hotswap_policy():
    yield PolicyProvider(name="longest_first", options=Options, build=lambda context: LongestFirst(context.options))
"""
A_VICTIM = """
@hookimpl
def hotswap_victim():
    yield Provider(name="last", build=lambda context: Last())
"""
A_SCHEDULER = """
from hotswap.core.contracts import Provider, Scheduler, hookimpl

class OneByOne(Scheduler):
    def schedule(self):
        plan = self.mechanism.begin_plan()
        for view in tuple(self.mechanism.running):
            wanted = plan.num_tokens_wanted(view)
            if wanted and plan.can_schedule(view, wanted):
                plan.schedule(view, wanted)
        view = self.policy.peek()
        if view is not None and not self.mechanism.running:
            wanted = min(plan.num_tokens_to_admit(view), plan.budget.num_tokens)
            if plan.can_admit(view, wanted):
                self.policy.pop()
                plan.admit(view, wanted)
        return plan.build()

@hookimpl
def hotswap_scheduler():
    yield Provider(name="one_by_one", build=lambda c: OneByOne(c.mechanism, c.policy, c.victim))
"""


def simulate(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    found = main(["simulate", *words])
    out, err = capsys.readouterr()
    assert found == status, err
    return out if status == 0 else err


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(simulate(capsys, *words, "--json"))
    return found


def results(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["policy"]: run["results"] for run in document["runs"]}


def test_policies_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*BUSY, "--plugin", "policy=fcfs", "--plugin", "policy=priority", "--slo", "ttft=500ms,tpot:50ms"]
    found = as_json(capsys, *words)
    assert found["kind"] == "hotswap-simulate"
    assert found["engine"]["num_blocks"] == 120
    fcfs, priority = results(found)["fcfs"], results(found)["priority"]
    for run in (fcfs, priority):
        assert (run["num_requests"], run["num_answered"], run["refused"]) == (80, 80, {})
        assert run["output_tokens"] == found["workload"]["output_tokens"]
        assert run["num_users"] == 3 and 1 / 3 <= run["fairness"] <= 1
        assert len(run["ttft"]["quantiles"]) == 201
        assert 0 < run["hit_rate"] < 1
        assert run["goodput"]["limits"] == {"ttft": 0.5, "tpot": 0.05}
    assert fcfs["ttft"] != priority["ttft"]
    assert found["runs"][1]["plugins"]["victim"] == "lowest_priority"
    table = simulate(capsys, *words)
    for heading in ("policy", "TTFT", "TPOT", "E2E", "p50 p95 p99", "goodput", "preempted", "fairness", "hit rate"):
        assert heading in table
    assert "80 requests, " in table and "on h200" in table and "a minute" in table
    assert f"{fcfs['request_throughput']:.2f}" in next(line for line in table.splitlines() if line.startswith("fcfs"))


def test_without_torch_and_the_same_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*BUSY, "--plugin", "fcfs", "--plugin", "policy=priority", "--json"]
    here = simulate(capsys, *words)
    program = (
        "import sys; from hotswap.server.cli.main import main; status = main(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr); sys.exit(status)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program, "simulate", *words], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == here
    loaded = set(done.stderr.split())
    assert "hotswap.core.simulator.replica" in loaded
    assert not loaded & {"torch", "transformers", "fastapi", "matplotlib", "zmq"}


def test_a_seed_is_a_load(capsys: pytest.CaptureFixture[str]) -> None:
    one = as_json(capsys, *BUSY)
    other = as_json(capsys, "--synthetic", SPEC.replace("seed=2", "seed=3"), *BUSY[2:])
    assert one["runs"][0]["policy"] == "fcfs"
    assert one["runs"][0]["results"]["ttft"] != other["runs"][0]["results"]["ttft"]


def test_a_policy_out_of_a_file_beside_a_built_in_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(LONGEST_FIRST + A_VICTIM)
    found = as_json(
        capsys, *BUSY, "--plugin", f"{path}", "--plugin", "policy=longest_first,sign=1", "--plugin", "policy=fcfs"
    )
    assert list(results(found)) == ["longest_first", "longest_first,sign=1", "fcfs"]
    medians = [run["ttft"]["p50"] for run in results(found).values()]
    assert medians[0] > medians[1]
    assert [run["plugins"]["victim"] for run in found["runs"]] == ["last"] * 3


def test_a_scheduler_and_an_observer_out_of_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, trace = tmp_path / "one.py", tmp_path / "out.jsonl"
    path.write_text(A_SCHEDULER)
    words = ["--synthetic", "requests=6,rate=inf,prompt=50,output=5"]
    found = as_json(capsys, *words, "--plugin", str(path), "--plugin", f"observer=trace,path={trace}")
    plugins = found["runs"][0]["plugins"]
    assert (plugins["scheduler"], plugins["observer"]) == ("one_by_one", "trace")
    assert found["runs"][0]["results"]["num_steps"] == 6 * 5
    assert [row.prompt_tokens for row in read_trace(trace)] == [50] * 6
    again = as_json(capsys, "--trace", str(trace))  # what was written can be asked again
    assert again["workload"]["output_tokens"] == 30
    assert results(again)["fcfs"]["num_steps"] == 5


def test_a_plugin_that_raises_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(LONGEST_FIRST.replace("return self.sign", "return 1 // 0 + self.sign"))
    err = simulate(capsys, *BUSY, "--plugin", str(path), status=2)
    assert err.count("\n") == 1
    assert "mine.py" in err and "ZeroDivisionError" in err


def test_a_trace_its_first_part_and_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:17:{second:02d}.5000000,200,3" for second in range(20)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    found = as_json(capsys, "--trace", str(path), "--num-requests", "11", "--trace-speed", "2", "--max-tokens", "100")
    assert (found["workload"]["num_requests"], found["workload"]["last_arrival"]) == (11, 5.0)
    assert found["workload"]["source"] == f"trace {path} (Azure)"
    assert results(found)["fcfs"]["output_tokens"] == 33


def test_what_steps_cost_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.json"
    path.write_text('{"weight_seconds": 1.0, "token_seconds": 0.0}')
    words = ["--synthetic", "requests=1,prompt=10,output=4", "--cost", str(path)]
    found = as_json(capsys, *words, "--device", "cpu", "--model", "smollm2-135m")
    assert results(found)["fcfs"]["e2e"]["max"] == 4.0
    assert found["cost"]["source"] == f"file {path}"
    assert (found["device"], found["model"]["name"]) == ("cpu", "smollm2-135m")
    assert found["engine"]["max_num_batched_tokens"] == 512


@pytest.mark.parametrize(
    ("spec", "measured"),
    [
        (
            "requests=256,rate=inf,prompt=64,output=64,shared_prefix=1024",
            r"\| shared prefix, output tokens/s \| ([\d,]+)",
        ),
        ("requests=256,rate=inf,prompt=1088,output=64", r"the same sizes, nothing shared \| \**([\d.]+) s"),
    ],
)
def test_whole_runs_of_an_h200(spec: str, measured: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Against what docs/benchmarks.md says of the same requests on the card."""
    found = re.search(measured, BENCHMARKS.read_text())
    assert found is not None
    simulated = results(as_json(capsys, "--synthetic", spec))["fcfs"]
    value = simulated["output_throughput"] if "," in found[1] else simulated["duration"]
    assert value == pytest.approx(float(found[1].replace(",", "")), rel=0.25)


def test_the_cache_is_what_the_device_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--synthetic", "requests=1,prompt=10,output=4"]
    sizes = {
        device: as_json(capsys, *words, "--device", device)["engine"]["num_blocks"]
        for device in ("h200", "l40s", "A100")
    }
    assert sizes["l40s"] < sizes["A100"] < sizes["h200"]
    room = 0.9 * 140 * 2**30 - 2 * 2**30 - 16_059_990_016
    assert sizes["h200"] == int(room) // (16 * 131072) - 1
    given = as_json(capsys, *words, "--kv-cache-memory-bytes", str(16 * 131072 * 10))
    assert given["engine"]["num_blocks"] == 9


def test_nothing_answered_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--synthetic", "requests=2,prompt=900,output=1", "--max-model-len", "100"]) == 1
    out = capsys.readouterr().out
    assert "turned away at the door: context_length_exceeded (2)" in out


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--synthetic", "requests=20", "--plugin", "policy=fcfs", "--plugin", "policy=priority", "--plot"]
    for slo in ([], ["--slo", "ttft:500ms"]):
        path = tmp_path / "sim.svg"
        simulate(capsys, *words, str(path), *slo)
        ElementTree.fromstring(path.read_text())
        for text in ("TTFT", "E2E", "fcfs", "priority", "goodput" if slo else "throughput"):
            assert f">{text}<" in path.read_text()
    simulate(capsys, *words, str(tmp_path / "sim.png"))
    assert (tmp_path / "sim.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    err = simulate(capsys, *BUSY, "--plot", "x.png", status=2)
    assert err == "hotswap: error: --plot needs matplotlib: pip install 'hotswap[bench]' (or pip install matplotlib)\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--trace FILE or --synthetic SPEC"),
        (["--trace", "x", "--synthetic", "requests=1"], "one of them"),
        (["--synthetic", "requests=1", "--num-requests", "3"], "there is no --trace"),
        (["--synthetic", "requests=1", "--max-tokens", "0"], "at least 1"),
        (["--synthetic", "requests=1", "--plot", "x.gif"], "--plot x.gif: its name must end in"),
        (["--synthetic", "requests=1", "--plot", "nowhere/x.png"], "no such folder"),
        (["--synthetic", "requests=1", "--slo", "speed=3"], "SLO 'speed=3'"),
        (["--synthetic", "requests=1", "--device", "h20"], "did you mean 'h200'"),
        (["--synthetic", "requests=1", "--model", "nowhere"], "give a config.json"),
        (["--synthetic", "requests=1", "--max-model-len", "999999"], "131072 tokens"),
        (["--synthetic", "requests=1", "--device", "rtx4090", "--dtype", "float32"], "no room for a KV cache"),
        (["--synthetic", "requests=1", "--plugin", "policy=fcsf"], "did you mean 'fcfs'"),
        (["--synthetic", "requests=1", "--plugin", "policy=fcfs,speed=3"], "takes no options"),
        (["--synthetic", "requests=1", "--plugin", "fcfs", "--plugin", "policy=fcfs"], "given twice"),
        (["--synthetic", "requests=1", "--plugin", "attention=paged_cpu"], "has no attention plugin"),
        (["--synthetic", "requests=1", "--plugin", "paged_cpu"], "has no attention plugin"),
        (
            ["--synthetic", "requests=1", "--plugin", "victim=newest", "--plugin", "victim=lowest_priority"],
            "two choices",
        ),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = simulate(capsys, *words, status=2)
    assert err.startswith("hotswap: error: ") and err.count("\n") == 1
    assert message in err


def test_variants_follow_the_strongest_source() -> None:
    selections = [
        parse("policy=fcfs", CONFIG_FILE),
        parse("attention=paged_cpu", CONFIG_FILE),  # of a server's file: passed over
        parse("priority", COMMAND_LINE),
        parse("victim=newest", CONFIG_FILE),
    ]
    variants = policy_variants(selections, BUILTIN_PLUGINS)
    assert [variant.label for variant in variants] == ["priority"]
    assert [selection.kind for selection in variants[0].manager.selections] == ["victim", "policy"]
    assert [variant.label for variant in policy_variants(selections[:2], BUILTIN_PLUGINS)] == ["fcfs"]
    assert [variant.label for variant in policy_variants([], BUILTIN_PLUGINS)] == [""]
    with pytest.raises(UsageError, match="given twice"):
        policy_variants([parse("policy=fcfs", CONFIG_FILE)] * 2, BUILTIN_PLUGINS)
    with pytest.raises(PluginError, match="no plugin of any kind"):
        policy_variants([parse("fcsf", COMMAND_LINE)], BUILTIN_PLUGINS)
