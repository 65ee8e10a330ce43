"""Warnings, documents, comparisons and pictures of results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hotswap.core.errors import UsageError
from hotswap.core.load.distribution import distribution
from hotswap.server.bench import comparison, picture, report
from hotswap.server.bench.measure import Chunk, RequestRecord, parse_slo, summarize
from hotswap.server.bench.runner import ClientHealth, Run
from hotswap.server.bench.workload import PlannedRequest, Workload
from hotswap.server.cli import bench_compare
from hotswap.server.cli.main import main

QUIET = ClientHealth(distribution([0.0001] * 100), 0.1)


def records(count: int = 120, gap: float = 0.02, **fields: Any) -> list[RequestRecord]:
    made = []
    for index in range(count):
        sent = index * 0.1
        chunks = [Chunk(sent + 0.05 + gap * n, 1) for n in range(5)]
        record = RequestRecord(index, sent, sent, chunks[-1].time, chunks, 10, 5, None, "usage", "length")
        for name, value in fields.items():
            setattr(record, name, value)
        made.append(record)
    return made


def workload(count: int = 120, rate: float | None = 10.0) -> Workload:
    gap = 0.0 if rate is None else 1 / rate
    return Workload("synthetic", tuple(PlannedRequest(n, n * gap, 10, 5) for n in range(count)))


def warnings(
    found: list[RequestRecord], health: ClientHealth = QUIET, *, plan: Workload | None = None, exact: bool = True
) -> str:
    return "\n".join(report.find_warnings(plan or workload(), summarize(found), health, exact_lengths=exact))


def test_a_run_without_blemish_has_no_warning() -> None:
    assert warnings(records()) == ""


def test_failures_are_told() -> None:
    assert "120 of 120 requests failed: HTTP 500: why" in warnings(records(error="HTTP 500", error_detail="why"))


@pytest.mark.parametrize("health", [ClientHealth(distribution([0.05] * 10), 0.1), ClientHealth(None, 0.97)])
def test_a_client_that_was_the_limit_is_told(health: ClientHealth) -> None:
    assert "the client itself was the limit" in warnings(records(), health)


def test_a_rate_that_was_not_reached_is_told() -> None:
    assert "20.00 requests/s were planned and 10.00 were sent" in warnings(records(), plan=workload(rate=20.0))
    assert warnings(records(), plan=workload(rate=None)) == ""


def test_answers_that_are_too_short_are_told() -> None:
    assert "does not ignore it" in warnings(records(output_tokens=3))
    assert "does not ignore it" not in warnings(records(output_tokens=3), exact=False)


def test_guessed_counts_are_told() -> None:
    assert "without a usage" in warnings(records(counted_by="chunks"))
    merged = records(output_tokens=9)
    for record in merged:
        record.chunks = [Chunk(chunk.time, 0) for chunk in record.chunks]
    assert "more than one token" in warnings(merged, exact=False)
    counted = records(output_tokens=10)
    for record in counted:
        record.chunks = [Chunk(chunk.time, 2) for chunk in record.chunks]
    assert warnings(counted, exact=False) == ""  # ITL is right whatever was merged
    assert "p99 of 20 requests" in warnings(records(20), plan=workload(20))


def document(gap: float = 0.02, **more: Any) -> dict[str, Any]:
    found = records(gap=gap)
    return report.document(
        "hotswap-bench-throughput",
        {"seed": 0},
        workload(),
        Run(found, QUIET, 0.0),
        summarize(found, parse_slo("ttft:1s")),
        notes=["a note"],
        warnings=[],
        engine={"prefix_hits": 5, "preemptions_recompute": 0, "preemptions_swap": 0, "kv_usage_peak": 0.5},
        **more,
    )


def test_documents_are_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    report.write_document(path, document(with_requests=True))
    value = report.read_document(path)
    assert value["date"] == "1970-01-01T00:00:00Z" and value["versions"]["hotswap"]
    assert value["results"]["itl"]["p50"] == pytest.approx(0.02) and value["results"]["goodput"]["share"] == 1.0
    assert len(value["requests"]) == 120 and value["requests"][0]["itl"] == pytest.approx([0.02] * 4)
    assert "requests" not in document()


@pytest.mark.parametrize("content", ["{", "[]", '{"kind":"other"}', '{"kind":"hotswap-bench-serve","format":99}'])
def test_documents_that_are_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"a\.json"):
        report.read_document(path)


def test_comparison() -> None:
    one, two = document(0.02), document(0.04)
    two["engine"].pop("kv_usage_peak")
    rows = {row.name: row for row in comparison.compare([one, two])}
    assert rows["ITL p50"].values == pytest.approx((20.0, 40.0)) and rows["ITL p50"].ratios == pytest.approx((1.0, 2.0))
    assert not rows["ITL p50"].more_is_better and rows["output tokens/s"].more_is_better
    assert rows["preemptions, recomputed"].ratios == (None, None), "nothing is a multiple of zero"
    assert rows["KV cache used at most"].values[1] is None
    assert comparison.differences([one, two]) == []


def test_comparisons_that_are_none_are_told() -> None:
    one, two = document(), document()
    two["settings"]["seed"] = 1
    two["workload"]["planned_prompt_tokens"] = 5
    two["results"]["num_completed"] -= 3
    found = "\n".join(comparison.differences([one, two]))
    assert "seed 1" in found and "planned_prompt_tokens" in found and "3 requests failed" in found


def test_bench_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, gap in (("fcfs", 0.02), ("fair", 0.01)):
        report.write_document(tmp_path / f"{name}.json", document(gap))
    files = [str(tmp_path / "fcfs.json"), str(tmp_path / "fair.json")]
    assert main(["bench", "compare", *files, "--json", str(tmp_path / "c.json")]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("ITL p50")]
    assert line.split()[-3:] == ["20.00", "10.00", "0.500"]
    value = json.loads((tmp_path / "c.json").read_text())
    assert value["labels"] == ["fcfs", "fair"] and value["warnings"] == []
    assert main(["bench", "compare", files[0]]) == 2
    assert main(["bench", "compare", *files, "--label", "x"]) == 2
    assert main(["bench", "compare", files[0], str(tmp_path / "none.json")]) == 2
    assert bench_compare._labels([Path("a/x.json"), Path("b/x.json")]) == ["a/x.json", "b/x.json"]


def test_bench_needs_a_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2 and main(["bench", "--help"]) == 0
    assert "throughput" in capsys.readouterr().out
    assert main(["bench", "serv"]) == 2
    assert "did you mean 'serve'" in capsys.readouterr().err


# Pictures.


@pytest.mark.parametrize("count", [1, 2])
def test_a_picture_has_its_panels(tmp_path: Path, count: int) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.svg"
    documents = [document(0.02), document(0.05)][:count]
    picture.draw(path, documents, ["one", "two"][:count], "The title")
    words = "".join(ElementTree.parse(path).getroot().itertext())
    for word in ("The title", "TTFT", "ITL", "E2E", "output tokens/s", "requests in flight", "seconds since"):
        assert word in words
    assert ("two" in words) == (count == 2)


def test_a_picture_of_failures_only(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    value = document()
    value["results"] |= {"ttft": None, "itl": None, "e2e": None}
    value["timeline"] = None
    picture.draw(tmp_path / "p.png", [value], ["x"], "x")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"hotswap\[bench\]"):
        picture.check_picture(Path("a.png"))
    with pytest.raises(UsageError, match="must end in"):
        picture.check_picture(Path("a.gif"))


def test_settings_never_hold_a_key() -> None:
    import argparse

    from hotswap.server.cli.bench_flags import recorded_settings

    assert recorded_settings(argparse.Namespace(api_key="secret", url="u")) == {"url": "u"}


def test_the_client_needs_no_engine() -> None:
    """A machine that only measures starts quickly: neither torch nor the server's own libraries are imported."""
    code = (
        "import sys; from hotswap.server.cli import main\n"
        "import hotswap.server.cli.complete, hotswap.server.cli.compare, hotswap.server.cli.bench_throughput\n"
        "print('LIGHT', *{name.partition('.')[0] for name in sys.modules})\n"
        "assert main(['bench', 'serve', '--url', '127.0.0.1:9']) == 1\n"
        "print('RUN', *{name.partition('.')[0] for name in sys.modules})"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    light, run = (set(line.split()) for line in done.stdout.splitlines())
    assert not light & {"torch", "httpx", "fastapi", "matplotlib"}
    assert "httpx" in run and not run & {"torch", "transformers", "fastapi", "matplotlib", "zmq"}
