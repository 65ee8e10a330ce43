"""`hotswap simulate --trace FILE --plugin policy=A --plugin policy=B`: the scheduler and its plugins on a virtual clock."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hotswap.core.config import EngineConfig
from hotswap.core.errors import HotswapError, UsageError

from .flags import add_flags
from .main import configure_logging
from .settings import Settings, add_config_flag, builtin_plugins, read_settings

if TYPE_CHECKING:
    from hotswap.core.simulator.assembly import ReplicaBuilder, Setup
    from hotswap.core.simulator.report import PolicyRun
    from hotswap.core.simulator.requests import Workload

DEFAULT_DEVICE: Final = "h200"
REDRAW_SECONDS: Final = 0.1
_FIELDS: Final = {
    "max_model_len",
    "dtype",
    "seed",
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "enable_prefix_caching",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "max_num_queued_reqs",
    "async_scheduling",
    "plugin",
    "strict_plugins",
    "scheduling_policy",
    "log_level",
}

_RECORDED: Final = (
    "trace",
    "synthetic",
    "num_requests",
    "trace_speed",
    "hash_block_tokens",
    "max_tokens",
    "cost",
    "slo",
)


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("The load")
    group.add_argument("--trace", metavar="FILE", help="JSON lines, a Mooncake trace, or an Azure LLM inference CSV.")
    group.add_argument(
        "--synthetic",
        metavar="SPEC",
        help="requests=N,rate=R,seed=S,prompt=LENGTHS,output=LENGTHS,users=N,shared_prefix=N,... instead of a trace.",
    )
    group.add_argument("--num-requests", type=int, metavar="N", help="The first N requests of a trace.")
    group.add_argument(
        "--trace-speed", type=float, metavar="FACTOR", help="2 plays a trace twice as fast (default: 1)."
    )
    group.add_argument(
        "--hash-block-tokens", type=int, metavar="N", help="Tokens of a hash id of a trace (default: 512)."
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="What every request asks for at most; it then ends by a token. Not given: its own length, which policies see.",
    )
    group = parser.add_argument_group("The model and the device")
    group.add_argument(
        "--model",
        dest="shape",
        metavar="CONFIG",
        help="A config.json, its folder, or a known shape (default: llama-3.1-8b).",
    )
    group.add_argument("--device", metavar="NAME", help=f"As for `hotswap recommend` (default: {DEFAULT_DEVICE}).")
    group.add_argument("--cost", metavar="FILE", help="What steps cost, as JSON, instead of the device's data sheet.")
    group = parser.add_argument_group("Results")
    group.add_argument("--slo", metavar="LIMITS", help="Times for goodput, such as ttft:500ms,tpot:50ms,e2e:10s.")
    group.add_argument("--json", action="store_true", help="Print one object instead of a table.")
    group.add_argument("--plot", metavar="FILE", help="Draw the policies side by side: .png, .svg or .pdf.")
    group.add_argument("--no-progress", action="store_true", help="No progress bar.")
    add_config_flag(parser)
    add_flags(parser, EngineConfig, only=_FIELDS.__contains__)


def run(arguments: argparse.Namespace) -> int:
    """0 when every policy answered something, else 1. Raises HotswapError."""
    from hotswap.core.load.objectives import parse_limits
    from hotswap.core.simulator.assembly import ReplicaBuilder
    from hotswap.core.simulator.variants import policy_variants

    _check(arguments)
    limits = parse_limits(arguments.slo) if arguments.slo is not None else None
    settings = read_settings(arguments, EngineConfig)
    config = settings.build(EngineConfig)
    configure_logging("warning" if "log_level" not in settings.command_line else config.log_level)
    setup = _setup(arguments, config)
    variants = policy_variants(settings.selections(), builtin_plugins(), strict=config.plugins.strict_plugins)
    builders = [ReplicaBuilder(variant.manager, setup) for variant in variants]
    plugins = [builder.check() for builder in builders]
    labels = [variant.label or names["policy"] for variant, names in zip(variants, plugins, strict=True)]
    workload = _workload(arguments)
    started = time.monotonic()
    with _bar(labels, len(workload.requests), enabled=not arguments.no_progress) as report:
        runs = [
            _run(builder, label, names, workload, arguments.max_tokens, limits, report)
            for builder, label, names in zip(builders, labels, plugins, strict=True)
        ]
    _publish(arguments, settings, setup, workload, runs, time.monotonic() - started)
    return 0 if all(run.results.num_answered for run in runs) else 1


def _check(arguments: argparse.Namespace) -> None:
    """What can be refused before anything is read. Raises UsageError."""
    if (arguments.trace is None) == (arguments.synthetic is None):
        raise UsageError("--trace FILE or --synthetic SPEC: one of them is needed (docs/researchers/simulate.md)")
    for name in ("num_requests", "hash_block_tokens", "max_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: at least 1 is needed")
    for name in ("num_requests", "trace_speed", "hash_block_tokens"):
        if arguments.trace is None and getattr(arguments, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: there is no --trace")
    if arguments.plot is not None:
        from ..bench.picture import check_picture
        from .bench_flags import check_output

        check_picture(Path(arguments.plot), "--plot")
        check_output(f"--plot {arguments.plot}", Path(arguments.plot).absolute())


def _setup(arguments: argparse.Namespace, config: EngineConfig) -> Setup:
    from hotswap.core.devices import find_device
    from hotswap.core.simulator.assembly import Setup, engine_size
    from hotswap.core.simulator.model_shape import DEFAULT_SHAPE, read_shape
    from hotswap.core.simulator.step_cost import derive_cost, read_cost

    shape = read_shape(arguments.shape or DEFAULT_SHAPE, config.model.dtype)
    device = find_device(
        arguments.device or DEFAULT_DEVICE,
        otherwise="for another one give --cost FILE and --num-gpu-blocks-override N with one of these",
    )
    cost = derive_cost(shape, device) if arguments.cost is None else read_cost(arguments.cost)
    return Setup(config, shape, device, cost, engine_size(config, shape, device))


def _workload(arguments: argparse.Namespace) -> Workload:
    from hotswap.core.simulator.synthetic import synthetic_workload
    from hotswap.core.simulator.traces import HASH_BLOCK_TOKENS, read_workload

    if arguments.synthetic is not None:
        return synthetic_workload(arguments.synthetic)
    block = HASH_BLOCK_TOKENS if arguments.hash_block_tokens is None else arguments.hash_block_tokens
    workload = read_workload(arguments.trace, hash_block_tokens=block).first(arguments.num_requests)
    return workload.faster(1.0 if arguments.trace_speed is None else arguments.trace_speed)


def _run(
    builder: ReplicaBuilder,
    label: str,
    plugins: Mapping[str, str],
    workload: Workload,
    max_tokens: int | None,
    limits: Mapping[str, float] | None,
    report: Callable[[str, int], None],
) -> PolicyRun:
    from hotswap.core.simulator.measures import summarize
    from hotswap.core.simulator.report import PolicyRun
    from hotswap.core.simulator.simulation import Simulation

    simulation = Simulation(workload.requests)
    replica = builder.build(simulation.ended, max_tokens=max_tokens)
    try:
        outcome = simulation.run(replica, lambda ended: report(label, ended))
    except HotswapError:
        raise  # written for the reader already
    except Exception as error:  # a plugin may raise anything; it is named
        blamed = builder.blame(error)
        if blamed is None:
            raise
        raise blamed from error
    report(label, simulation.num_ended)
    return PolicyRun(label, plugins, summarize(outcome, limits))


@contextmanager
def _bar(labels: Sequence[str], total: int, *, enabled: bool) -> Iterator[Callable[[str, int], None]]:
    """Progress on standard error when that is a terminal; what is yielded takes (policy, requests that have ended)."""
    if not enabled or not sys.stderr.isatty():
        yield lambda label, ended: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        tasks = {label: bar.add_task(label, total=total, start=False) for label in labels}
        started: set[str] = set()
        shown_at = 0.0

        def report(label: str, ended: int) -> None:
            nonlocal shown_at
            now = time.monotonic()
            if now - shown_at < REDRAW_SECONDS and ended < total:
                return
            shown_at = now
            if label not in started:
                started.add(label)
                bar.start_task(tasks[label])
            bar.update(tasks[label], completed=ended, refresh=True)

        yield report


def _publish(
    arguments: argparse.Namespace,
    settings: Settings,
    setup: Setup,
    workload: Workload,
    runs: Sequence[PolicyRun],
    seconds: float,
) -> None:
    from hotswap.core.simulator import report

    given = {**settings.config_file, **settings.command_line}
    recorded = {name: given[name] for name in sorted(_FIELDS) if name in given}
    for name in _RECORDED:
        if getattr(arguments, name) is not None:
            recorded[name] = getattr(arguments, name)
    found = report.document(setup, workload, runs, recorded)
    if arguments.plot is not None:
        from .simulate_picture import draw

        draw(Path(arguments.plot), found)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    report.print_report(console, setup, workload, runs)
    count = len(workload.requests) * len(runs)
    console.print(f"- {count} requests simulated in {seconds:.1f} s, {60 * count / max(seconds, 1e-9):,.0f} a minute")
