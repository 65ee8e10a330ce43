"""The flags that say what a benchmark asks, and the workload that they make; common to `bench serve` and `throughput`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotswap.core.errors import UsageError

if TYPE_CHECKING:
    from ..bench.workload import Workload

NUM_REQUESTS = 100
INPUT_LENGTH = "256"
OUTPUT_LENGTH = "128"
LENGTH_FORMS = "N, uniform:LOW,HIGH, normal:MEAN,STD, lognormal:MEAN,SIGMA, exponential:MEAN, zipf:EXPONENT,MAX"
_SYNTHETIC = ("input_len", "shared_prefix_len", "num_prefixes", "turns")
_PACE = ("request_rate", "arrival", "burstiness")


def add_workload_flags(parser: argparse.ArgumentParser, *, own_seed: bool) -> None:
    """own_seed: add --seed; an engine's flags have one already, which then counts for the workload as well."""
    group = parser.add_argument_group("Workload")
    add = group.add_argument
    add("--num-requests", type=int, metavar="N", help=f"Requests; {NUM_REQUESTS}, or all of a trace or dataset.")
    add("--input-len", metavar="LENGTHS", help=f"Tokens that a prompt adds: {LENGTH_FORMS} (default: {INPUT_LENGTH}).")
    add("--output-len", metavar="LENGTHS", help=f"Tokens to ask for, in the same forms (default: {OUTPUT_LENGTH}).")
    add("--shared-prefix-len", type=int, metavar="N", help="Tokens that prompts share, before their own (default: 0).")
    add("--num-prefixes", type=int, metavar="N", help="How many such prefixes there are; each prompt draws one.")
    add("--turns", type=int, metavar="N", help="Requests of a conversation; each prompt holds the turns before it.")
    add("--trace", metavar="FILE", help="Arrivals, lengths, prefixes and sessions from a trace (JSON lines).")
    add("--trace-speed", type=float, metavar="FACTOR", help="2 plays a trace twice as fast (default: 1).")
    add("--dataset", metavar="FILE", help='Prompts from JSON lines: texts, {"prompt": ...} or {"messages": ...}.')
    if own_seed:
        add("--seed", type=int, default=0, metavar="N", help="Of arrivals, lengths and prompts (default: 0).")
    add("--request-rate", type=float, metavar="R", help="Requests a second; inf, the default, is all at once.")
    add("--arrival", choices=("poisson", "uniform", "bursty"), help="Arrival process (default: poisson).")
    add("--burstiness", type=float, metavar="SHAPE", help="Of --arrival bursty: below 1 in bursts, 1 is poisson.")
    add("--max-concurrency", type=int, metavar="N", help="Requests in flight at once; no limit when not given.")
    add("--warmup", type=int, default=0, metavar="N", help="Requests sent before, not measured (default: 0).")
    add("--slo", metavar="LIMITS", help="Times for goodput, such as ttft:500ms,tpot:50ms,e2e:10s.")


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Results")
    group.add_argument("--json", metavar="FILE", help="Write everything as JSON.")
    group.add_argument("--save-requests", action="store_true", help="Put each request's times into --json.")
    group.add_argument("--picture", metavar="FILE", help="Draw the curves and the timeline: .png, .svg or .pdf.")
    group.add_argument("--save-trace", metavar="FILE", help="Write what was sent as a trace.")
    group.add_argument("--no-progress", action="store_true", help="No progress bar.")


def check_flags(arguments: argparse.Namespace) -> None:
    """Everything that can be refused before there is a server. Raises UsageError."""
    from ..bench.measure import parse_slo
    from ..bench.picture import check_picture

    sources = [name for name in ("trace", "dataset") if getattr(arguments, name) is not None]
    if len(sources) > 1:
        raise UsageError("--trace and --dataset: give one of them")
    if sources == ["trace"]:
        _refuse(arguments, (*_SYNTHETIC, *_PACE, "output_len"), "--trace says it already")
    elif sources == ["dataset"]:
        _refuse(arguments, (*_SYNTHETIC, "trace_speed"), "a dataset has its own prompts")
    else:
        _refuse(arguments, ("trace_speed",), "there is no --trace")
    if arguments.burstiness is not None and arguments.arrival != "bursty":
        raise UsageError("--burstiness is the shape of --arrival bursty")
    if arguments.num_prefixes is not None and not arguments.shared_prefix_len:
        raise UsageError("--num-prefixes needs --shared-prefix-len")
    for name in ("num_requests", "max_concurrency"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: at least 1 is needed")
    if arguments.warmup < 0:
        raise UsageError(f"--warmup {arguments.warmup}: at least 0 is needed")
    if arguments.slo is not None:
        parse_slo(arguments.slo)
    if arguments.save_requests and arguments.json is None:
        raise UsageError("--save-requests writes into --json FILE, which is not given")
    for name in ("json", "save_trace", "picture"):
        path = getattr(arguments, name)
        if path is not None:
            check_output(f"--{name.replace('_', '-')} {path}", Path(path).absolute())
    if arguments.picture is not None:
        check_picture(Path(arguments.picture))


def check_output(what: str, path: Path) -> None:
    """A run may take hours: that its result cannot be written is said before. Raises UsageError."""
    if not path.parent.is_dir():
        raise UsageError(f"{what}: there is no such folder")
    if path.is_dir():
        raise UsageError(f"{what}: this is a folder; a file is needed")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{what}: it cannot be written")


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]
    if given:
        raise UsageError(f"{', '.join(given)}: {why}")


def make_workload(arguments: argparse.Namespace, seed: int) -> Workload:
    """Raises UsageError."""
    import math

    from hotswap.core.load.lengths import parse_lengths

    from ..bench.workload import Shape, from_dataset, from_trace, synthetic

    shape = Shape(
        arguments.num_requests or NUM_REQUESTS,
        parse_lengths(arguments.input_len or INPUT_LENGTH, "--input-len"),
        parse_lengths(arguments.output_len or OUTPUT_LENGTH, "--output-len"),
        rate=math.inf if arguments.request_rate is None else arguments.request_rate,
        process=arguments.arrival or "poisson",
        burstiness=1.0 if arguments.burstiness is None else arguments.burstiness,
        shared_prefix_tokens=arguments.shared_prefix_len or 0,
        num_prefixes=1 if arguments.num_prefixes is None else arguments.num_prefixes,
        turns=1 if arguments.turns is None else arguments.turns,
    )
    if arguments.trace is not None:
        speed = 1.0 if arguments.trace_speed is None else arguments.trace_speed
        return from_trace(Path(arguments.trace), speed=speed, limit=arguments.num_requests)
    if arguments.dataset is not None:
        return from_dataset(
            Path(arguments.dataset),
            shape,
            seed,
            given_number=arguments.num_requests,
            given_output=arguments.output_len is not None,
        )
    return synthetic(shape, seed)


def warmup_workload(arguments: argparse.Namespace, seed: int) -> Workload | None:
    """Requests of the same lengths with other prompts, so that no cache learns the run's own; None for none."""
    import dataclasses

    if not arguments.warmup:
        return None
    workload = make_workload(arguments, seed + 1_000_003)
    count = len(workload.requests)
    requests = tuple(
        dataclasses.replace(workload.requests[n % count], index=-1 - n, arrival=0.0, session="", turn=0, new_tokens=0)
        for n in range(arguments.warmup)
    )
    return dataclasses.replace(workload, requests=requests, notes=())


def recorded_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What --json keeps of the flags: never a key."""
    return {name: value for name, value in sorted(vars(arguments).items()) if name not in ("api_key", "hf_token")}
