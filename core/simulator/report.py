"""Results of several policies beside each other: as an object for --json, and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..load.distribution import Distribution
from ..version import __version__
from .assembly import Setup
from .measures import Results
from .requests import Workload

if TYPE_CHECKING:
    from rich.console import Console

FORMAT: Final = 1
FEW_REQUESTS: Final = 100


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """label: the policy as it was asked for. plugins: kind -> name of what was at work."""

    label: str
    plugins: Mapping[str, str]
    results: Results


def document(
    setup: Setup, workload: Workload, runs: Sequence[PolicyRun], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything but the time that simulating took, so that the same command gives the same object. Times in seconds."""
    requests = workload.requests
    return {
        "kind": "hotswap-simulate",
        "format": FORMAT,
        "version": __version__,
        "settings": dict(settings),
        "workload": {
            "source": workload.source,
            "num_requests": len(requests),
            "prompt_tokens": sum(request.prompt_tokens for request in requests),
            "output_tokens": sum(request.output_tokens for request in requests),
            "last_arrival": max((request.arrival for request in requests), default=0.0),
            "notes": list(workload.notes),
        },
        "model": {
            "name": setup.shape.name,
            "dtype": setup.shape.dtype,
            "weight_bytes": setup.shape.weight_bytes,
            "kv_bytes_per_token": setup.shape.kv_bytes_per_token,
        },
        "device": setup.device.name,
        "cost": msgspec.to_builtins(setup.cost),
        "engine": {
            **dataclasses.asdict(setup.size.limits),
            "num_blocks": setup.size.num_blocks,
            "block_size": setup.size.block_size,
            "enable_prefix_caching": setup.size.enable_prefix_caching,
            "max_steps_in_flight": setup.size.max_steps_in_flight,
        },
        "runs": [
            {"policy": run.label, "plugins": dict(run.plugins), "results": dataclasses.asdict(run.results)}
            for run in runs
        ],
    }


def facts(setup: Setup, workload: Workload) -> list[str]:
    """What the table is about, a line each."""
    size, requests = setup.size, workload.requests
    count = len(requests)
    prompt = sum(request.prompt_tokens for request in requests) / max(1, count)
    output = sum(request.output_tokens for request in requests) / max(1, count)
    return [
        f"{workload.source}: {count} requests, {prompt:.0f} prompt and {output:.0f} output tokens on average",
        f"{setup.shape.name} ({setup.shape.dtype}) on {setup.device.name}; steps: {setup.cost.source}",
        f"{size.num_blocks} blocks of {size.block_size} tokens, {size.limits.max_num_seqs} requests and "
        f"{size.limits.max_num_batched_tokens} tokens a step, {size.max_steps_in_flight} steps in flight",
    ]


def print_report(console: Console, setup: Setup, workload: Workload, runs: Sequence[PolicyRun]) -> None:
    """Lines of facts, one row for each policy, notes."""
    from rich.table import Table

    for line in facts(setup, workload):
        console.print(line, soft_wrap=True)
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = _columns(runs)
    table.add_column("policy")
    for name in columns:
        table.add_column(name, justify="right")
    for run in runs:
        table.add_row(run.label, *(cell(run.results) for cell in columns.values()))
    console.print(table)
    for line in notes(workload, runs):
        console.print(f"- {line}", soft_wrap=True)


def _columns(runs: Sequence[PolicyRun]) -> dict[str, Any]:
    """Heading -> what stands below it. Columns that would say nothing are left out."""
    columns: dict[str, Any] = {
        "req/s": lambda r: f"{r.request_throughput:.2f}",
        "tokens/s": lambda r: f"{r.output_throughput:.0f}",
    }
    for name in ("ttft", "tpot", "e2e"):
        found = [value for run in runs if (value := getattr(run.results, name)) is not None]
        factor, unit, digits = _unit(max((value.p99 for value in found), default=0.0))
        columns[f"{name.upper()} {unit}\np50 p95 p99"] = partial(_percentiles, name, factor, digits)
    if any(run.results.goodput for run in runs):
        columns["goodput"] = lambda r: f"{r.goodput.requests_per_second:.2f}/s {r.goodput.share:.0%}"
    columns["preempted"] = lambda r: f"{r.num_preemptions}"
    if any(run.results.num_users > 1 for run in runs):
        columns["fairness"] = lambda r: f"{r.fairness:.3f}"
    columns["hit rate"] = lambda r: "-" if r.hit_rate is None else f"{r.hit_rate:.1%}"
    columns["busy"] = lambda r: f"{r.busy:.0%}"
    if any(run.results.num_answered < run.results.num_requests for run in runs):
        columns["refused"] = lambda r: f"{r.num_requests - r.num_answered}"
    return columns


def _unit(largest: float) -> tuple[float, str, int]:
    """Factor, name and digits that suit seconds up to `largest`."""
    if largest >= 10:
        return 1.0, "s", 1
    return (1e3, "ms", 0) if largest >= 0.1 else (1e3, "ms", 1)


def _percentiles(name: str, factor: float, digits: int, results: Results) -> str:
    found: Distribution | None = getattr(results, name)
    if found is None:
        return "-"
    return " ".join(f"{value * factor:.{digits}f}" for value in (found.p50, found.p95, found.p99))


def notes(workload: Workload, runs: Sequence[PolicyRun]) -> list[str]:
    """What the reader should know before believing the figures."""
    found = list(workload.notes)
    for run in runs:
        if run.results.refused:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in run.results.refused.items())
            found.append(f"{run.label}: turned away at the door: {reasons}")
        if run.results.shed:
            found.append(f"{run.label}: {run.results.shed} requests were queued and given up on")
    fewest = min((run.results.num_answered for run in runs), default=0)
    if 0 < fewest < FEW_REQUESTS:
        found.append(f"p99 of {fewest} requests is little more than their maximum")
    return found
