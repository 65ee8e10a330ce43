#!/usr/bin/env python3
"""Attention `triton_paged` on a card: is it right, and how near to the card's ceilings is it?

    PYTHONPATH=src python benchmarks/gpu/attention.py [--sweep] [--only decode|prefill] [--heads 32,8,128] [--out x.jsonl]

1. Correctness first: fresh random inputs against float32 attention in torch, outputs poisoned.
2. The table: milliseconds of one layer's attention in a CUDA graph that goes through several caches, so that none of them
   sits in the card's L2; TB/s of keys and values read for decode, TFLOP/s for prefill.
3. --sweep: the same for other launch shapes and splits, compiled in threads first; the best one of each workload is marked
   with *. From it the table in plugins/attention/triton_paged/tuning.py is chosen.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotswap.core.contracts.attention import AttentionLayer, BatchGeometry
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.layers.reference import attention
from hotswap.plugins.attention.triton_paged.backend import TritonPagedAttention
from hotswap.plugins.attention.triton_paged.tuning import Shape

PAGE = 16
UNEVEN = tuple(100 + (7919 * at) % 7900 for at in range(64))  # 100 .. 8,000
L2_BYTES = 256 << 20  # caches in turn are at least so large together
DECODE: dict[str, tuple[int, ...]] = {
    **{f"decode {rows} x 576": (576,) * rows for rows in (1, 8, 32, 64, 256)},
    **{f"decode {rows} x 1024": (1024,) * rows for rows in (64, 256)},
    "decode 1 x 4096": (4096,),
    "decode 1 x 32000": (32000,),
    "decode 8 x 8000": (8000,) * 8,
    "decode uneven x 8": UNEVEN[:8],
    "decode uneven x 64": UNEVEN,
}
PREFILL: dict[str, tuple[tuple[int, int], ...]] = {
    "prefill 2048": ((2048, 2048),),
    "prefill 8192": ((8192, 8192),),
    "prefill 32 x 1024": ((1024, 1024),) * 32,
    "chunk 512 of 8704": ((512, 8704),),
    "draft 8 x 5 of 2000": ((5, 2000),) * 8,
}
DECODE_SHAPES = [
    Shape(16, block_n, warps, stages) for block_n in (32, 64, 128) for warps in (2, 4) for stages in (2, 3, 4)
]
PREFILL_SHAPES = [
    Shape(128, 64, 8, 2),
    Shape(128, 64, 8, 3),
    Shape(128, 64, 8, 4),
    Shape(128, 128, 8, 2),
    Shape(64, 64, 4, 2),
    Shape(64, 64, 4, 3),
    Shape(64, 128, 4, 2),
]
SPLITS = ((1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (12, 1), (16, 1), (32, 1), (48, 1), (4, 4), (8, 4))
SPLIT_SHAPES = (Shape(16, 64, 4, 2), Shape(16, 32, 2, 2), Shape(16, 32, 4, 2))
SWEPT = (
    "decode 1 x 576",
    "decode 8 x 576",
    "decode 32 x 576",
    "decode 64 x 576",
    "decode 256 x 576",
    "decode 1 x 32000",
    "decode 8 x 8000",
)


@dataclass(frozen=True)
class Workload:
    """contexts: (new tokens, context length) of each request."""

    name: str
    contexts: tuple[tuple[int, int], ...]

    @property
    def is_decode(self) -> bool:
        return all(new <= 8 for new, _ in self.contexts)

    def bytes_read(self, layer: AttentionLayer) -> int:
        return sum(length for _, length in self.contexts) * layer.num_kv_heads * 2 * layer.head_dim_k * 2

    def operations(self, layer: AttentionLayer) -> float:
        pairs = sum(new * length - new * (new - 1) / 2 for new, length in self.contexts)
        return 4.0 * pairs * layer.num_heads * layer.head_dim_k


@dataclass
class Data:
    geometry: BatchGeometry
    query: Tensor
    caches: list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Row:
    workload: str
    variant: str
    milliseconds: float
    terabytes: float
    teraflops: float


def geometry_of(contexts: Sequence[tuple[int, int]], *, decode: bool) -> BatchGeometry:
    counts = [-(-length // PAGE) for _, length in contexts]
    order = (torch.randperm(sum(counts)) + 1).to(torch.int32)
    table = torch.zeros((len(contexts), max(counts) + 1), dtype=torch.int32)
    first = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = order[first : first + count]
        first += count
    new = torch.tensor([new for new, _ in contexts])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), new.cumsum(0)))
    return BatchGeometry(
        query_start_loc=starts.to("cuda", torch.int32),
        seq_lens=torch.tensor([length for _, length in contexts], dtype=torch.int32, device="cuda"),
        block_table=table.cuda(),
        slot_mapping=torch.full((int(starts[-1]),), -1, device="cuda"),
        num_tokens=int(starts[-1]),
        num_requests=len(contexts),
        max_query_len=int(new.max()),
        # As in a graph, where it is the model's longest context.
        max_seq_len=max(32768, *(length for _, length in contexts)) if decode else max(n for _, n in contexts),
        block_size=PAGE,
    )


def make_data(workload: Workload, layer: AttentionLayer, copies: int | None = None) -> Data:
    geometry = geometry_of(workload.contexts, decode=workload.is_decode)
    num_blocks = 1 + sum(-(-length // PAGE) for _, length in workload.contexts)
    shape = (num_blocks, PAGE, layer.num_kv_heads, layer.head_dim_k)
    if copies is None:
        copies = min(24, max(2, -(-L2_BYTES // (4 * num_blocks * PAGE * layer.num_kv_heads * layer.head_dim_k))))
    caches = [
        (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(copies)
    ]
    query = torch.randn((geometry.num_tokens, layer.num_heads, layer.head_dim_k), device="cuda", dtype=torch.bfloat16)
    return Data(geometry, query, caches)


# Correctness.


def check(workload: Workload, layer: AttentionLayer, backend: TritonPagedAttention) -> float:
    """The relative error of the output; NaN where something was not written."""
    data = make_data(workload, layer, copies=1)
    poison = torch.full_like(data.query, float("nan"))
    del poison  # the allocator hands the same memory out again
    backend.prepare(data.geometry)
    found = backend.forward(data.query, data.caches[0], layer).float()
    start, error, norm = 0, 0.0, 0.0
    for request, (new, length) in enumerate(workload.contexts):
        blocks = data.geometry.block_table[request, : -(-length // PAGE)].long()
        keys, values = (stored[blocks].flatten(0, 1)[:length] for stored in data.caches[0])
        for first in range(0, new, 256):  # a slice of queries at a time: the scores are a matrix
            last = min(first + 256, new)
            seen = length - new + last
            rows = slice(start + first, start + last)
            expected = attention(data.query[rows], keys[:seen], values[:seen], layer)
            error += float((found[rows] - expected).square().sum())
            norm += float(expected.square().sum())
        start += new
    return math.sqrt(error / norm)


def check_all(layer: AttentionLayer) -> bool:
    workloads = [
        Workload("decode", tuple((1, length) for length in (1, 17, 576, 2000, 31))),
        Workload("decode, split", ((1, 32000), (1, 100))),
        Workload("drafts", ((5, 700), (8, 64), (1, 9))),
        Workload("prefill", ((1000, 1000), (33, 33))),
        Workload("mixed", ((1, 700), (300, 1500), (1, 1), (9, 40), (64, 64))),
    ]
    fine = True
    for deterministic in (False, True):
        backend = TritonPagedAttention(device_info(), deterministic=deterministic)
        for workload in workloads:
            error = check(workload, layer, backend)
            good = error < 6e-3
            fine &= good
            print(
                f"{'ok  ' if good else 'BAD '} {workload.name:16} relative error {error:.1e}"
                f"{' (deterministic)' if deterministic else ''}",
                flush=True,
            )
    return fine


# Time.


def device_info() -> DeviceInfo:
    return DeviceInfo(
        kind="rocm" if torch.version.hip else "cuda",
        name=torch.cuda.get_device_name(),
        capability=torch.cuda.get_device_capability(),
    )


def graph_of(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def timed(data: Data, layer: AttentionLayer, backend: TritonPagedAttention, budget: float) -> float:
    """Milliseconds of one forward: a graph goes over the caches, as a step goes over layers."""
    backend.prepare(data.geometry)

    def run() -> None:
        for cache in data.caches:
            backend.forward(data.query, cache, layer)

    graph = graph_of(run)
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / len(data.caches))
    return statistics.median(times)


def measure(
    workload: Workload, data: Data, layer: AttentionLayer, backend: TritonPagedAttention, variant: str, budget: float
) -> Row:
    milliseconds = timed(data, layer, backend, budget)
    seconds = milliseconds / 1e3
    terabytes = workload.bytes_read(layer) / seconds / 1e12
    return Row(workload.name, variant, milliseconds, terabytes, workload.operations(layer) / seconds / 1e12)


def shown(row: Row, mark: str = " ") -> str:
    return (
        f"{mark}{row.workload:22} {row.variant:28} {row.milliseconds:8.4f} ms  {row.terabytes:5.2f} TB/s"
        f"  {row.teraflops:6.1f} TFLOP/s"
    )


def workloads_of(only: str | None) -> list[Workload]:
    found = []
    if only != "prefill":
        found += [Workload(name, tuple((1, length) for length in lengths)) for name, lengths in DECODE.items()]
    if only != "decode":
        found += [Workload(name, contexts) for name, contexts in PREFILL.items()]
    return found


def variants(workload: Workload, heads: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and arguments of the backends to try."""
    if not workload.is_decode:
        for shape in PREFILL_SHAPES:
            yield name_of(shape), {"prefill": shape}
        return
    if heads > 16:
        return  # the shapes below have 16 rows
    for shape in DECODE_SHAPES:
        yield name_of(shape), {"decode": shape}
    for splits in SPLITS:
        for shape in (None, *SPLIT_SHAPES):
            yield f"splits {splits} {name_of(shape) if shape else ''}", {"splits": splits, "decode": shape}


def name_of(shape: Shape) -> str:
    return f"{shape.rows}x{shape.block_n} warps {shape.warps} stages {shape.stages}"


def compile_all(layer: AttentionLayer) -> list[str]:
    """Compiles what the sweep launches, in threads; returns what could not be compiled or launched."""
    small = {True: Workload("decode", ((1, 200),)), False: Workload("prefill", ((200, 200),))}
    tried = [
        (small[True], {"decode": shape, "splits": splits}) for shape in DECODE_SHAPES for splits in ((1, 1), (2, 1))
    ]
    tried += [(small[False], {"prefill": shape}) for shape in PREFILL_SHAPES]

    def one(job: tuple[Workload, dict[str, Any]]) -> str:
        workload, options = job
        data = make_data(workload, layer, copies=1)
        backend = TritonPagedAttention(device_info(), **options)
        backend.prepare(data.geometry)
        try:
            backend.forward(data.query, data.caches[0], layer)
        except Exception as error:  # noqa: BLE001 - a shape that does not fit the card is a result
            return f"{options}: {error}"
        return ""

    with ThreadPoolExecutor(8) as pool:
        return [text for text in pool.map(one, tried) if text]


def sweep(layer: AttentionLayer, only: str | None, budget: float) -> Iterator[Row]:
    started = time.perf_counter()
    refused = compile_all(layer)
    print(f"compiled in {time.perf_counter() - started:.0f} s", *refused, sep="\n", flush=True)
    group = layer.num_heads // layer.num_kv_heads
    for workload in workloads_of(only):
        if workload.is_decode and workload.name not in SWEPT:
            continue
        data, rows = make_data(workload, layer), []
        for name, options in variants(workload, group):
            backend = TritonPagedAttention(device_info(), **options)
            try:
                rows.append(measure(workload, data, layer, backend, name, budget))
            except Exception as error:  # noqa: BLE001 - as above
                print(f" {workload.name:22} {name:28} {str(error)[:60]}")
        best = min((row.milliseconds for row in rows), default=0.0)
        for row in sorted(rows, key=lambda row: row.milliseconds)[:8]:
            print(shown(row, "*" if row.milliseconds == best else " "), flush=True)
        yield from rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other launch shapes, too")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--heads", default="32,8,128", help="query heads, KV heads, head size")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    options = parser.parse_args()
    heads, kv_heads, size = map(int, options.heads.split(","))
    layer = AttentionLayer(0, heads, kv_heads, size, size, size**-0.5)
    torch.manual_seed(0)
    if not check_all(layer):
        return 1
    rows = []
    for workload in workloads_of(options.only):
        backend = TritonPagedAttention(device_info())
        rows.append(measure(workload, make_data(workload, layer), layer, backend, "table", 0.2))
        print(shown(rows[-1]), flush=True)
    if options.sweep:
        rows += sweep(layer, options.only, 0.05)
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
