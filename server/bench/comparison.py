"""Several results of `bench --json` beside each other: ratios to the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

# (path in a document, heading, unit, whether more is better)
FIGURES: Final[tuple[tuple[tuple[str, ...], str, str, bool], ...]] = (
    (("results", "request_throughput"), "requests/s", "", True),
    (("results", "prompt_throughput"), "prompt tokens/s", "", True),
    (("results", "output_throughput"), "output tokens/s", "", True),
    (("results", "total_throughput"), "total tokens/s", "", True),
    (("results", "goodput", "requests_per_second"), "goodput, requests/s", "", True),
    *(
        (("results", name, point), f"{name.upper()} {point}", "ms", False)
        for name in ("ttft", "tpot", "itl", "e2e")
        for point in ("mean", "p50", "p95", "p99")
    ),
    (("engine", "preemptions_recompute"), "preemptions, recomputed", "", False),
    (("engine", "preemptions_swap"), "preemptions, swapped", "", False),
    (("engine", "prefix_hits"), "prefix cache hits, tokens", "", True),
    (("engine", "kv_usage_peak"), "KV cache used at most", "%", False),
)
_SCALE: Final = {"": 1.0, "ms": 1e3, "%": 100.0}


@dataclass(frozen=True, slots=True)
class Row:
    """values, ratios (to the first): one for each document, None where it has no such figure, or the first has none or
    0."""

    name: str
    unit: str
    more_is_better: bool
    values: tuple[float | None, ...]
    ratios: tuple[float | None, ...]


def compare(documents: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row for each figure that at least one document has."""
    table = []
    for path, name, unit, better in FIGURES:
        values = tuple(_at(document, path) for document in documents)
        if all(value is None for value in values):
            continue
        base = values[0]
        ratios = tuple(value / base if value is not None and base else None for value in values)
        scaled = tuple(value * _SCALE[unit] if value is not None else None for value in values)
        table.append(Row(name, unit, better, scaled, ratios))
    return table


def _at(document: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = document
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, (int, float)) else None


def differences(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """What makes a comparison doubtful: other work, other settings of the workload, failures."""
    found = []
    first = documents[0]
    for number, document in enumerate(documents[1:], start=2):
        for key in ("num_requests", "planned_prompt_tokens", "planned_output_tokens"):
            if document["workload"][key] != first["workload"][key]:
                found.append(
                    f"result {number} is of another workload: {key} is {document['workload'][key]}, in the first one "
                    f"{first['workload'][key]}"
                )
        for key in sorted(WORKLOAD_SETTINGS):
            ours, theirs = document["settings"].get(key), first["settings"].get(key)
            if ours != theirs:
                found.append(f"result {number} has {key} {ours}, the first one {theirs}")
    for number, document in enumerate(documents, start=1):
        failed = document["results"]["num_requests"] - document["results"]["num_completed"]
        if failed:
            found.append(f"result {number}: {failed} requests failed, and failures are quick")
    return found


WORKLOAD_SETTINGS: Final = frozenset(
    {
        "seed",
        "request_rate",
        "arrival",
        "burstiness",
        "trace_speed",
        "max_concurrency",
        "warmup",
        "ignore_eos",
        "temperature",
        "paced",
    }
)
