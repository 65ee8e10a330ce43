"""What benchmarks/gpu/profile_steps.py makes of a trace: idle time, gaps, and Python's garbage collections."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "profile_steps.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_profile_steps", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules[spec.name] = module  # data classes look their module up
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def event(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat}


# Microseconds. "wide" runs beside "first" and "second" and ends after both.
EVENTS = [
    event("wide", 1000, 500),
    event("first", 1100, 50),
    event("second", 1200, 250),
    event("copy", 1700, 100, "gpu_memcpy"),
    event("third", 1800, 100),
    event("fourth", 2700, 300, "gpu_memset"),
]


def test_device_events_are_in_order_and_of_the_device(script: ModuleType, tmp_path: Path) -> None:
    host = [event("cudaGraphLaunch", 900, 90, "cuda_runtime"), {"name": "a thread's name", "ph": "M"}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [*reversed(EVENTS), *host]}))
    assert script.device_events(path) == EVENTS


def test_gaps_lie_between_what_ended_last_and_what_came_next(script: ModuleType) -> None:
    found = list(script.gaps(EVENTS, steps=3))
    assert [(gap.ms, gap.at_ms, gap.step, gap.before, gap.after) for gap in found] == [
        (0.2, 0.5, 1, "wide", "copy"),  # the fourth of six launches is in the second third
        (0.8, 0.9, 2, "third", "fourth"),
    ]
    assert script.span_ms(EVENTS) == 2.0
    assert list(script.gaps(EVENTS[:3], steps=1)) == []
    assert script.span_ms(EVENTS[:3]) == 0.5


def test_the_report(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    collections = [{"generation": 2, "count": 3, "ms": 31.5, "longest_ms": 30.0, "longest_at_step": 17}]
    row = script.report(64, EVENTS, 2, 1, collections)
    assert row == {
        "batch": 64,
        "step_ms": 1.0,
        "idle": 0.5,
        "kernels": {"wide": [0.25, 0.5]},
        "gaps": [
            {"ms": 0.8, "at_ms": 0.9, "step": 1, "before": "third", "after": "fourth"},
            {"ms": 0.2, "at_ms": 0.5, "step": 1, "before": "wide", "after": "copy"},
        ],
        "collections": collections,
    }
    text = capsys.readouterr().out
    assert "device idle 50.00 %" in text
    assert "gap of 0.800 ms in step 1, at 0.90 ms: third -> fourth" in text
    assert "generation 2: 3, 31.50 ms in all, the longest 30.00 ms in step 17" in text
    assert script.report(1, EVENTS, 2, 1)["collections"] == []


def test_only_the_five_largest_gaps_are_reported(script: ModuleType) -> None:
    ends = [0, *(10 * n + n * n for n in range(1, 9))]
    row = script.report(1, [event(f"k{n}", end - 1, 1) for n, end in enumerate(ends)], 1, 1)
    lengths = [gap["ms"] for gap in row["gaps"]]
    assert len(lengths) == 5 and lengths == sorted(lengths, reverse=True)
    assert row["gaps"][0]["after"] == "k8"
    assert row["idle"] == pytest.approx(1 - len(ends) / (ends[-1] + 1), abs=1e-4), "smaller gaps count as idle too"


def test_collections_are_counted_by_generation(script: ModuleType) -> None:
    collections = script.Collections()
    gc.collect(2)  # before
    collections.start()
    try:
        for collections.step, generation in enumerate((0, 2, 0, 1, 0)):
            gc.collect(generation)
    finally:
        collections.stop()
    gc.collect(2)  # after
    rows = {row["generation"]: row for row in collections.rows()}
    assert rows[2]["count"] == 1 and rows[2]["longest_at_step"] == 1
    assert rows[0]["count"] >= 3, "Python may collect on its own account too"
    assert all(0 < row["longest_ms"] <= row["ms"] + 1e-3 for row in rows.values())
    assert list(rows) == sorted(rows)
    json.dumps(collections.rows())
