"""A run as a document (what --json writes), as warnings, and as a table."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from hotswap.core.errors import UsageError
from hotswap.core.load.distribution import Distribution
from hotswap.core.version import __version__

from .measure import RequestRecord, Summary, e2e, itls, timeline, tpot, ttft
from .runner import ClientHealth, Run
from .workload import Workload

FORMAT: Final = 1
SLOW_SHARE: Final = 0.95  # of the planned rate, or of the asked lengths: below it the reader is told
LATE_SECONDS: Final = 0.010
BUSY_SHARE: Final = 0.9
FEW_REQUESTS: Final = 100
_MEASURES: Final = ("ttft", "tpot", "itl", "e2e")
_NAMES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "start_delay": "start delay"}


def document(
    kind: str,
    settings: Mapping[str, Any],
    workload: Workload,
    run: Run,
    summary: Summary,
    *,
    notes: Sequence[str],
    warnings: Sequence[str],
    engine: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    with_requests: bool = False,
) -> dict[str, Any]:
    """Everything that is known of a run, as JSON can hold it. Times in seconds."""
    line = timeline(run.records)
    result: dict[str, Any] = {
        "kind": kind,
        "format": FORMAT,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.started)),
        "versions": versions(),
        "settings": dict(settings),
        "workload": {
            "source": workload.source,
            "num_requests": len(workload.requests),
            "planned_rate": workload.planned_rate,
            "planned_prompt_tokens": sum(r.prompt_tokens for r in workload.requests),
            "planned_output_tokens": sum(r.output_tokens for r in workload.requests),
        },
        "results": dataclasses.asdict(summary),
        "client": dataclasses.asdict(run.health),
        "timeline": dataclasses.asdict(line) if line is not None else None,
        "interrupted": run.interrupted,
        "notes": list(notes),
        "warnings": list(warnings),
    }
    if engine is not None:
        result["engine"] = dict(engine)
    if server is not None:
        result["server"] = dict(server)
    if with_requests:
        result["requests"] = [request_row(record) for record in run.records]
    return result


def versions() -> dict[str, str]:
    return {"hotswap": __version__, "python": platform.python_version(), "httpx": metadata.version("httpx")}


def request_row(record: RequestRecord) -> dict[str, Any]:
    """One record, without its text."""
    return {
        "index": record.index,
        "due": record.due,
        "sent": record.sent,
        "end": record.end,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "error_detail": record.error_detail or None,
        "ttft": ttft(record),
        "tpot": tpot(record),
        "e2e": e2e(record),
        "itl": itls(record),
    }


def write_document(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces the file."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_document(path: Path) -> dict[str, Any]:
    """A document of `write_document`. Raises UsageError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict) or not str(value.get("kind", "")).startswith("hotswap-bench-"):
        raise UsageError(f"{path}: not a result of hotswap bench --json")
    if value.get("format") != FORMAT:
        raise UsageError(f"{path}: format {value.get('format')} is not the one that this version reads ({FORMAT})")
    return value


def find_warnings(workload: Workload, summary: Summary, health: ClientHealth, *, exact_lengths: bool) -> list[str]:
    """What the reader must know before a figure is believed. exact_lengths: end-of-sequence was to be ignored."""
    found = []
    for kind, count in summary.errors.items():
        found.append(f"{count} of {summary.num_requests} requests failed: {kind}: {summary.error_examples[kind]}")
    limited = client_was_the_limit(summary, health)
    if limited is not None:
        found.append(f"the client itself was the limit ({limited}): the server may be quicker than these figures")
    planned, achieved = workload.planned_rate, summary.achieved_rate
    if planned is not None and achieved is not None and achieved < SLOW_SHARE * planned:
        found.append(
            f"{planned:.2f} requests/s were planned and {achieved:.2f} were sent: "
            "the limit of concurrency, conversations that wait for their answers, or the client held them back"
        )
    asked = sum(request.output_tokens for request in workload.requests)
    if exact_lengths and not summary.errors and summary.output_tokens < SLOW_SHARE * asked:
        found.append(
            f"answers had {summary.output_tokens} tokens of {asked} asked for although end-of-sequence was to be "
            "ignored: this server does not ignore it"
        )
    if summary.counted_by.get("chunks"):
        found.append(
            f"{summary.counted_by['chunks']} answers came without a usage: their chunks were counted as tokens, and prompt "
            "lengths are the planned ones"
        )
    several = summary.chunks_with_several
    if several is not None and several > 1 - SLOW_SHARE and not summary.chunk_counts_known:
        found.append(
            f"{several:.0%} of the chunks brought more than one token: without counts for each chunk "
            "(--chunk-usage), ITL is the time between chunks; TPOT is not affected"
        )
    if 0 < summary.num_completed < FEW_REQUESTS:
        found.append(f"p99 of {summary.num_completed} requests is little more than their maximum")
    return found


def interruption(ended: int, planned: int) -> str:
    """The first thing that the reader must know of a run that was stopped."""
    return (
        f"interrupted: the figures are of the {ended} of {planned} requests that had ended by then; those in flight, "
        "the longest among them, are left out"
    )


def client_was_the_limit(summary: Summary, health: ClientHealth) -> str | None:
    """Why the measuring process cannot have been quick enough; None when it was."""
    typical = summary.itl.p50 if summary.itl is not None else 0.0
    if health.lag is not None and health.lag.p99 > max(LATE_SECONDS, typical / 5):
        return f"its event loop was up to {health.lag.p99 * 1e3:.0f} ms late, at the 99th percentile"
    if health.cpu_share > BUSY_SHARE:
        return f"it used {health.cpu_share:.0%} of a core"
    return None


# The table.


def rows(summary: Summary, workload: Workload, engine: Mapping[str, Any] | None = None) -> list[tuple[str, str]]:
    """(name, value) of everything that is one figure."""
    table = [
        ("requests", f"{summary.num_completed} of {summary.num_requests} answered"),
        ("duration", f"{summary.duration:.2f} s"),
        ("prompt tokens", _with_cached(summary)),
        ("output tokens", f"{summary.output_tokens}"),
        ("requests/s", f"{summary.request_throughput:.2f}"),
        ("prompt tokens/s", f"{summary.prompt_throughput:.1f}"),
        ("output tokens/s", f"{summary.output_throughput:.1f}"),
        ("total tokens/s", f"{summary.total_throughput:.1f}"),
        ("peak concurrency", f"{summary.peak_concurrency}"),
    ]
    if workload.planned_rate is not None and summary.achieved_rate is not None:
        table.append(("arrival rate", f"{summary.achieved_rate:.2f} of {workload.planned_rate:.2f} requests/s planned"))
    if summary.goodput is not None:
        good = summary.goodput
        table.append(
            (
                "goodput",
                f"{good.requests_per_second:.2f} requests/s, {good.count} requests, {good.share:.1%} ({good.slo})",
            )
        )
    if engine is not None:
        table += engine_rows(engine)
    return table


def _with_cached(summary: Summary) -> str:
    if summary.cached_tokens is None or not summary.prompt_tokens:
        return f"{summary.prompt_tokens}"
    share = summary.cached_tokens / summary.prompt_tokens
    return f"{summary.prompt_tokens}, {summary.cached_tokens} from the prefix cache ({share:.1%})"


def engine_rows(engine: Mapping[str, Any]) -> list[tuple[str, str]]:
    hits = engine["prefix_hits"] / engine["prefix_queries"] if engine["prefix_queries"] else 0.0
    return [
        ("engine steps", f"{engine['steps']}, {engine['tokens_per_step']:.1f} tokens each"),
        ("preemptions", f"{engine['preemptions_recompute']} recomputed, {engine['preemptions_swap']} swapped"),
        ("prefix cache", f"{engine['prefix_hits']} of {engine['prefix_queries']} tokens ({hits:.1%})"),
        ("KV cache used", f"{engine['kv_usage_mean']:.1%} on average, {engine['kv_usage_peak']:.1%} at most"),
        ("running, waiting", f"{engine['running_peak']}, {engine['waiting_peak']} at most"),
    ]


def distributions(summary: Summary) -> dict[str, Distribution]:
    """The measures that there are, by their name in the table."""
    found: dict[str, Distribution] = {}
    for name in (*_MEASURES, "start_delay"):
        value = getattr(summary, name)
        if value is not None:
            found[_NAMES[name]] = value
    return found


def print_report(
    title: str, summary: Summary, workload: Workload, notes: Sequence[str], engine: Mapping[str, Any] | None = None
) -> None:
    """On standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    console.print(title, style="bold", soft_wrap=True)
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="dim")
    facts.add_column()
    for row in rows(summary, workload, engine):
        facts.add_row(*row)
    console.print(facts)
    times = Table(box=None, pad_edge=False, header_style="bold")
    times.add_column("ms", style="dim")
    for column in ("mean", "p50", "p90", "p95", "p99", "max", "samples"):
        times.add_column(column, justify="right")
    for name, d in distributions(summary).items():
        cells = (f"{value * 1e3:.2f}" for value in (d.mean, d.p50, d.p90, d.p95, d.p99, d.max))
        times.add_row(name, *cells, str(d.count))
    console.print()
    console.print(times)
    if notes:
        console.print()
    for note in notes:
        console.print(f"- {note}", soft_wrap=True)
