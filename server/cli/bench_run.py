"""What `bench serve` and `bench throughput` do alike: warm up, run with a progress bar, report."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotswap.core.errors import HotswapError

from .bench_flags import recorded_settings

if TYPE_CHECKING:
    from ..bench.prompts import PromptMaker
    from ..bench.runner import Progress, Run, Runner, Target
    from ..bench.workload import Workload

REDRAW_SECONDS = 0.2
INTERRUPTED = 130  # the exit status of a command that SIGINT ended


async def warm_up(target: Target, prompts: PromptMaker, workload: Workload | None, max_concurrency: int | None) -> None:
    """Raises HotswapError when nothing of it was answered: the run would not be either."""
    from ..bench.runner import Runner

    if workload is None:
        return
    run = await Runner(target, prompts, workload, max_concurrency=max_concurrency).run()
    if all(record.error is not None for record in run.records):
        record = run.records[0]
        raise HotswapError(f"no request of the warm-up was answered: {record.error}: {record.error_detail}")


@contextmanager
def _stopped_by_interrupt(runner: Runner) -> Iterator[None]:
    """The first Ctrl-C ends the run and keeps what was measured; the second one ends the command, as everywhere else."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        if not runner.stop():
            raise KeyboardInterrupt

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def with_progress(runner: Runner, *, enabled: bool) -> Run:
    """Runs, with a bar on standard error when that is a terminal. Ctrl-C ends the run early."""
    with _stopped_by_interrupt(runner):
        return await _with_bar(runner) if enabled and sys.stderr.isatty() else await runner.run()


async def _with_bar(runner: Runner) -> Run:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("requests", total=runner.progress.total, state="")

        async def redraw() -> None:
            while True:
                bar.update(task, completed=runner.progress.done, state=_state(runner.progress), refresh=True)
                await asyncio.sleep(REDRAW_SECONDS)

        drawing = asyncio.create_task(redraw())
        try:
            return await runner.run()
        finally:
            drawing.cancel()


def _state(progress: Progress) -> str:
    failed = f", {progress.failed} failed" if progress.failed else ""
    return f"{progress.running} in flight{failed}, {progress.output_tokens} tokens"


def publish(
    arguments: argparse.Namespace,
    kind: str,
    title: str,
    workload: Workload,
    run: Run,
    notes: Sequence[str],
    *,
    exact_lengths: bool,
    engine: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    more_settings: Mapping[str, Any] | None = None,
) -> int:
    """The table on standard output, warnings on standard error, the files that were asked for. 1 when no request was
    answered, 130 when the run was interrupted: the figures are then of the requests that had ended by then."""
    from ..bench import report
    from ..bench.measure import parse_slo, summarize
    from ..bench.picture import draw

    planned = len(workload.requests)
    if run.interrupted:
        workload = workload.only(record.index for record in run.records)
    summary = summarize(run.records, parse_slo(arguments.slo) if arguments.slo else None)
    warnings = report.find_warnings(workload, summary, run.health, exact_lengths=exact_lengths)
    if run.interrupted:
        warnings.insert(0, report.interruption(len(run.records), planned))
    notes = [*notes, *workload.notes]
    report.print_report(title, summary, workload, notes, engine)
    for warning in warnings:
        print(f"hotswap: warning: {warning}", file=sys.stderr)
    result = report.document(
        kind,
        {**recorded_settings(arguments), **(more_settings or {})},
        workload,
        run,
        summary,
        notes=notes,
        warnings=warnings,
        engine=engine,
        server=server,
        with_requests=arguments.save_requests,
    )
    if arguments.json is not None:
        report.write_document(Path(arguments.json), result)
    if arguments.picture is not None:
        draw(Path(arguments.picture), [result], [title], title)
    if arguments.save_trace is not None:
        _save_trace(Path(arguments.save_trace), workload, run)
    if run.interrupted:
        return INTERRUPTED
    return 0 if summary.num_completed else 1


def _save_trace(path: Path, workload: Workload, run: Run) -> None:
    """Answered requests only: of the others the lengths are not known."""
    from hotswap.core.trace import write_trace

    from ..bench.workload import Sent, trace_rows

    sent = [
        Sent(request, record.sent, record.prompt_tokens, record.output_tokens)
        for request, record in zip(workload.requests, run.records, strict=True)
        if record.error is None
    ]
    write_trace(path, trace_rows(sent))
