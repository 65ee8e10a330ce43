#!/usr/bin/env python3
"""The sampling ops of kernels `triton` on a card: are they right, and what do they take?

    PYTHONPATH=src python benchmarks/gpu/sampling.py [--rows 1,64,256] [--widths 128256,49152] [--out x.jsonl]

1. Each op is compared with its torch reference on fresh random, tied and flat logits; a draw also with itself in another
   batch, bit for bit. The share of other tokens is printed: a draw may differ where a sum of probability is rounded
   across the noise or the edge of top_p, which is expected of about one in 10,000. More than one in 100 ends the run.
2. Each is timed in a CUDA graph of several calls, in microseconds a call, beside what torch needs for the plain operation
   (its `max`, a whole sort). Logits of few rows stay in the L2 cache, as they do behind a model's head.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotswap.core.layers.sampling import blockwise, logprobs, penalties
from hotswap.core.layers.sampling.draw import ALWAYS, OFF
from hotswap.core.layers.sampling.draw import draw as reference_draw
from hotswap.plugins.kernels.triton import sampling

CHECKED_ROWS = 24
CALLS, REPLAYS = 8, 15
WORST_SHARE = 0.01
Call = Callable[[], Any]


def logits_of(kind: str, rows: int, width: int) -> Tensor:
    """peaked: a trained model's, roughly. flat: a model's with dummy weights."""
    logits = torch.randn((rows, width), device="cuda") * {"peaked": 3.0, "tied": 2.0, "flat": 1e-2}[kind]
    return logits.to(torch.bfloat16).float() if kind == "tied" else logits


def draw_arguments(logits: Tensor, top_k: int, top_p: float, min_p: float | None) -> list[Any]:
    rows = len(logits)

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    return [
        logits,
        logits.amax(1),
        column(0.8, torch.float32),
        None if min_p is None else column(min_p, torch.float32),
        torch.full((rows,), top_k, dtype=torch.int64, device="cuda"),
        column(top_p, torch.float64),
        torch.randint(-(2**62), 2**62, (rows,), device="cuda"),
        torch.randint(0, 4096, (rows,), device="cuda"),
        top_k != ALWAYS or top_p != OFF,
    ]


DRAWS: dict[str, tuple[Any, ...]] = {  # kind of logits, top_k, top_p, min_p
    "draw": ("peaked", ALWAYS, OFF, None),
    "draw min_p 0.05": ("peaked", ALWAYS, OFF, 0.05),
    "draw top_p 0.9": ("peaked", ALWAYS, 0.9, None),
    "draw top_p 0.9, tied": ("tied", ALWAYS, 0.9, None),
    "draw top_p 0.9, flat": ("flat", ALWAYS, 0.9, None),
    "draw top_k 50": ("peaked", 50, OFF, None),
    "draw top_k 50, top_p 0.9": ("peaked", 50, 0.9, None),
}


def check(width: int) -> dict[str, Any]:
    """Raises SystemExit where an op is wrong."""
    result: dict[str, Any] = {"check": width}
    for kind in ("peaked", "tied", "flat"):
        logits = logits_of(kind, CHECKED_ROWS, width)
        host = logits.cpu()
        values, ids = sampling.argmax(logits)
        wanted_values, wanted_ids = blockwise.row_max(host)
        _need(torch.equal(values.cpu(), wanted_values) and torch.equal(ids.cpu(), wanted_ids), f"argmax, {kind}")
        for count in (0, 5, 20, 100):
            found = [part.cpu() for part in sampling.gather_logprobs(logits, ids, count)]
            wanted = logprobs.gather_logprobs(host, wanted_ids, count)
            same = torch.equal(found[0], wanted[0]) and torch.equal(found[2], wanted[2])
            _need(same and float((found[1] - wanted[1]).abs().max()) < 1e-5, f"gather_logprobs {count}, {kind}")
        local = torch.arange(0, CHECKED_ROWS, 2, device="cuda")
        pool = torch.rand((CHECKED_ROWS, width), device="cuda") + 0.5
        wanted_logits = host.clone()
        penalties.penalize(wanted_logits, local.cpu(), local.cpu(), pool.cpu(), pool.cpu())
        sampling.penalize(logits, local, local, pool, pool)
        _need(torch.equal(logits.cpu(), wanted_logits), f"penalize, {kind}")
    others = total = 0
    for name, (kind, *settings) in DRAWS.items():
        given = draw_arguments(logits_of(kind, CHECKED_ROWS, width), *settings)
        together = sampling.draw(*given)
        for place in (0, 7):
            alone: Any = [part[place : place + 1] if isinstance(part, Tensor) else part for part in given]
            _need(torch.equal(sampling.draw(*alone)[0], together[place]), f"{name}: it depends on the batch")
        on_host: Any = [part.cpu() if isinstance(part, Tensor) else part for part in given]
        wanted_ids = reference_draw(*on_host)
        differing = int((together.cpu() != wanted_ids).sum())
        others, total = others + differing, total + CHECKED_ROWS
        _need(differing <= 1, f"{name}: {differing} of {CHECKED_ROWS} tokens are not the reference's")
    result["others"], result["draws"] = others, total
    _need(others <= WORST_SHARE * total, f"{others} of {total} draws are not the reference's")
    return result


def _need(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"wrong: {what}")


def microseconds(call: Call) -> float:
    """The median of a call in graph replays."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times)


def cases(rows: int, width: int) -> dict[str, Call]:
    logits = logits_of("peaked", rows, width)
    ids = torch.arange(rows, device="cuda")
    pool = torch.ones((rows, width), device="cuda")
    edited = logits.clone()
    found: dict[str, Call] = {
        "argmax": lambda: sampling.argmax(logits),
        "torch max": lambda: logits.max(1),
        "penalize": lambda: sampling.penalize(edited, ids, ids, pool, pool),
    }
    for count in (0, 5, 20):
        found[f"gather_logprobs {count}"] = lambda count=count: sampling.gather_logprobs(logits, ids, count)  # type: ignore[misc]
    for name, (kind, *settings) in DRAWS.items():
        given = draw_arguments(logits_of(kind, rows, width), *settings)
        found[name] = lambda given=given: sampling.draw(*given)  # type: ignore[misc]
    found["torch sort"] = lambda: torch.sort(logits, dim=1, descending=True, stable=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--widths", default="128256,49152")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    records: list[dict[str, Any]] = []
    all_rows = [int(rows) for rows in arguments.rows.split(",")]
    for width in map(int, arguments.widths.split(",")):
        records.append(check(width))
        print(f"width {width}: right; {records[-1]['others']} of {records[-1]['draws']} draws are not the reference's")
        taken: dict[str, list[float]] = {}
        for rows in all_rows:
            for name, call in cases(rows, width).items():
                median = microseconds(call)
                taken.setdefault(name, []).append(median)
                records.append({"width": width, "rows": rows, "op": name, "microseconds": median})
            torch.cuda.empty_cache()
        print(f"{'microseconds':28s}" + "".join(f"{rows:>10d}" for rows in all_rows))
        for name, medians in taken.items():
            print(f"{name:28s}" + "".join(f"{median:10.1f}" for median in medians), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
