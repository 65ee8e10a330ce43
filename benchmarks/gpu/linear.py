#!/usr/bin/env python3
"""The op `linear` of kernels `triton` on a card: is every launch shape right, which one is fastest, and what does a whole
model's chain of products take beside torch's library (cuBLAS)?

    PYTHONPATH=src python benchmarks/gpu/linear.py [--models 8b,smollm2] [--tokens 1,8,...] [--budget 150] [--out x.jsonl]

1. Worker processes compile every candidate and compare it on the card with float64, for normal and for dummy weights:
   fresh inputs, poisoned outputs, the same bits twice, and the same bits for a row without the others.
2. Each is timed in a CUDA graph: a chain of products over copies of the weight that no cache holds, and before each a
   tiny kernel that makes x of the product before, as a norm does. Reported is a product and its tiny kernel together.
   The best two of each matrix and number of tokens are then varied in what they do before x is there.
3. All layers' products in one graph as in ceilings.py, and once more with the tiny kernel before each product.
Last come rows for TABLE in plugins/kernels/triton/linear_table.py. All times are of this run's card and values.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotswap.plugins.kernels.triton.launch import ceil_div, next_power_of_two, num_sms
from hotswap.plugins.kernels.triton.linear import product
from hotswap.plugins.kernels.triton.linear_shapes import MATVEC_TOKENS, SMALL, Dot, Early, Matvec, Shape, shape_for

Matrix = tuple[int, int]  # N, K
Rows = dict[Matrix, list[tuple[int, Shape | None]]]  # up to so many tokens
MODELS: dict[str, tuple[int, tuple[Matrix, ...], Matrix]] = {  # layers, a layer's matrices in order, the head
    "8b": (32, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), (128256, 4096)),
    "smollm2": (30, ((960, 576), (576, 576), (3072, 576), (576, 1536)), (49152, 576)),
}
HEADS = {head for _, _, head in MODELS.values()}
CHAIN_TOKENS = (1, 8, 32, 64, 128, 256)
SHARED_MEMORY = 227 << 10
UNEVEN = 0.3  # of a wave of programs that split K: how much of the last one may be missing


@dataclass(frozen=True)
class Job:
    """A launch shape (None: torch's library) of a matrix for so many tokens."""

    matrix: Matrix
    tokens: int
    shape: Shape | None
    pdl: bool = True


@dataclass(frozen=True)
class Checked:
    job: Job
    error: float  # relative, the worst of the kinds of weights
    fault: str
    seconds: float


@triton.jit  # type: ignore[untyped-decorator]
def _touch_kernel(x, base, out, K, N, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, k = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.load(out + row * N + k % N, mask=k < K, other=0.0).to(tl.float32)
    value = tl.load(base + row * K + k, mask=k < K, other=0.0).to(tl.float32) + 0.0 * before
    tl.store(x + row * K + k, value.to(x.dtype.element_ty), mask=k < K)


def touch(x: Tensor, base: Tensor, out: Tensor) -> None:
    """x = base, but not before out is there."""
    k = x.shape[1]
    _touch_kernel[(x.shape[0],)](
        x, base, out, k, out.shape[1], BLOCK=next_power_of_two(k), PDL=True, num_warps=8, launch_pdl=True
    )


def out_dtype(matrix: Matrix) -> torch.dtype:
    return torch.float32 if matrix in HEADS else torch.bfloat16


def multiply(x: Tensor, weight: Tensor, shape: Shape | None, counters: Tensor, pdl: bool = True) -> Tensor:
    dtype = out_dtype((weight.shape[0], weight.shape[1]))
    if shape is not None:
        return product(x, weight, None, dtype, shape, counters, pdl)
    if dtype is x.dtype:
        return torch.mm(x, weight.t())
    return torch.mm(x, weight.t(), out_dtype=dtype)


def values(*size: int, normal: bool, seed: int | None = None) -> Tensor:
    generator = None if seed is None else torch.Generator("cuda").manual_seed(seed)
    made = torch.empty(*size, device="cuda", dtype=torch.bfloat16)
    return made.normal_(0, 0.02, generator=generator) if normal else made.uniform_(-1e-3, 1e-3, generator=generator)


# 1. Right?


def check(job: Job) -> Checked:
    """Run in a worker: it also leaves the compiled kernel in the cache on disk."""
    began = time.perf_counter()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then gives NaN
    try:
        error = max(_error(job, normal) for normal in (True, False))
        limit = 1e-4 if job.matrix in HEADS else 4e-3  # one rounding to bfloat16 is 1.7e-3
        fault = "" if error < limit else "inexact"
    except Exception as problem:  # noqa: BLE001 - a shape that does not compile or fit is a result, too
        error, fault = float("nan"), f"{type(problem).__name__}: {str(problem)[:200]}"
    return Checked(job, error, fault, time.perf_counter() - began)


_worker: dict[Any, Tensor] = {}


def _error(job: Job, normal: bool) -> float:
    n, k = job.matrix
    key = (job.matrix, normal)
    if key not in _worker:
        _worker[key] = values(n, k, normal=normal, seed=n + k)
    weight = _worker[key]
    counters = _worker.setdefault("counters", torch.zeros(4096, dtype=torch.int32, device="cuda"))
    x = torch.randn(job.tokens, k, device="cuda").bfloat16()
    out = multiply(x, weight, job.shape, counters, job.pdl)
    if not torch.equal(out, multiply(x, weight, job.shape, counters, job.pdl)):
        raise ValueError("two runs differ")
    if isinstance(job.shape, Dot) and not torch.equal(out[-1:], multiply(x[-1:], weight, job.shape, counters, job.pdl)):
        raise ValueError("a row depends on the others")
    rows = torch.cat((torch.arange(min(n, 128)), torch.arange(max(n - 128, 0), n), torch.randint(0, n, (1024,)))).cuda()
    exact = x.double() @ weight[rows].double().t()
    found = out[:, rows].double()
    return float((found - exact).norm() / exact.norm()) if found.isfinite().all() else float("inf")


# 2. Fast?


def candidates(matrix: Matrix, tokens: int, sms: int) -> Iterator[Shape]:
    n, k = matrix
    rule = shape_for((0, 0), n, k, tokens, sms)  # no capability: the rule, not the table
    if rule is not None:
        yield rule if isinstance(rule, Matvec) else replace(rule, stages=4)
    if tokens <= MATVEC_TOKENS:
        whole = next_power_of_two(k)
        for block_k in sorted({min(whole, size) for size in (1024, 2048, 4096)}):
            for elements, warps in ((2048, 2), (4096, 4), (8192, 4), (8192, 8), (16384, 8)):
                if elements >= block_k and (tokens == 1 or elements <= 1024 * warps):
                    yield Matvec(elements // block_k, block_k, warps)
    rows = min(max(next_power_of_two(tokens), 16), 128)
    for shape, together in _tiles(k, rows):
        for segments in (1, 2, 3, 4, 5, 6, 8):
            programs = ceil_div(tokens, shape.block_t) * ceil_div(n, shape.block_n) * segments
            waves = programs / sms
            one_wave = ceil(waves) - waves <= UNEVEN and waves <= together and k >= 512 * segments
            if one_wave or (segments == 1 and (waves > 1 or n * k <= SMALL)):
                yield replace(shape, segments=segments)


def _tiles(k: int, rows: int) -> Iterator[tuple[Dot, int]]:
    """Shapes and how many such programs a multiprocessor's shared memory is to hold."""
    for block_n, block_k, warps, programs, w_first, early in (
        (64, 128, 4, 2, True, Early.LINES),
        (64, 128, 4, 3, True, Early.LINES),
        (64, 256, 4, 1, True, Early.LINES),
        (128, 64, 4, 2, True, Early.LINES),
        (128, 128, 8, 1, True, Early.LINES),
        (64, 128, 4, 1, True, Early.REGISTERS),
        (32, 256, 4, 2, False, Early.LINES),
        (32, 128, 4, 4, False, Early.LINES),
        (32, 256, 4, 1, False, Early.REGISTERS),
        (16, 256, 2, 3, False, Early.LINES),
        (128, 64, 4, 2, False, Early.LINES),
    ):
        if (k % block_k and block_k > 64) or (rows > 32 and early is Early.REGISTERS):
            continue
        if rows < 64 and not w_first and block_n == 128:
            continue  # tokens are the left operand of wide tiles only where they fill the instruction
        for block_t in sorted({rows, min(rows, 64)}):
            stages = min(SHARED_MEMORY // programs // ((block_n + block_t) * block_k * 2), 8)
            if early is Early.REGISTERS:
                yield Dot(block_t, block_n, block_k, 1, True, warps, 1, w_first, early), 4
            elif stages >= 2:
                yield Dot(block_t, block_n, block_k, 1, True, warps, stages, w_first, early), programs
    if k < 4096:
        for block_t, block_n in ((16, 32), (16, 64), (32, 32), (32, 64), (64, 32), (64, 64)):
            if block_t <= rows:
                yield Dot(block_t, block_n, 64, stages=6, w_first=block_n >= 64, early_bytes=1024), 2


def variations(shape: Shape | None) -> Iterator[tuple[Shape, bool]]:
    """The shape with other things done before x is there, and launched plainly."""
    if shape is None:
        return
    yield shape, False
    if isinstance(shape, Dot):
        for early, size in (
            (Early.NOTHING, 512),
            (Early.LINES, 256),
            (Early.LINES, 1024),
            (Early.LINES, 2048),
            (Early.BULK, 512),
            (Early.BULK, 2048),
        ):
            if shape.early is not Early.REGISTERS:
                yield replace(shape, early=early, early_bytes=size), True


def graph_us(work: Callable[[], None], launches: int, target_ms: float = 4.0) -> float:
    """Microseconds of one of `launches` equal parts of `work` when it is replayed as a graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replays(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / count

    count = max(1, min(20, int(target_ms / max(replays(2), 1e-3))))
    return 1e3 * statistics.median(replays(count) for _ in range(3)) / launches


class Bench:
    """Times jobs; keeps what it found and writes it to a file."""

    def __init__(self, out: Path | None, deadline: float) -> None:
        self.out, self.deadline = out, deadline
        self.counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
        self.times: dict[Job, float] = {}
        self._copies: tuple[Matrix, list[Tensor]] | None = None

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def emit(self, **row: Any) -> None:
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps(row, default=str) + "\n")

    def copies(self, matrix: Matrix) -> list[Tensor]:
        if self._copies is None or self._copies[0] != matrix:
            self._copies = None
            size = 2 * matrix[0] * matrix[1]
            count = max(3 if matrix in HEADS else 8, ceil_div((600 if size > 20 << 20 else 150) << 20, size))
            self._copies = (matrix, [values(*matrix, normal=False) for _ in range(count)])
        return self._copies[1]

    def time(self, job: Job) -> None:
        weights, k = self.copies(job.matrix), job.matrix[1]
        base = torch.randn(job.tokens, k, device="cuda").bfloat16()
        x = base.clone()

        def chain() -> None:
            out = base
            for weight in weights:
                touch(x, base, out)
                out = multiply(x, weight, job.shape, self.counters, job.pdl)

        us = graph_us(chain, len(weights))
        self.times[job] = us
        tb = 2 * job.matrix[0] * job.matrix[1] / us / 1e6
        shape = None if job.shape is None else {type(job.shape).__name__: asdict(job.shape)}
        self.emit(what="product", matrix=job.matrix, tokens=job.tokens, pdl=job.pdl, us=us, tb_per_s=tb, shape=shape)

    def ranking(self, matrix: Matrix, tokens: int, pdl: bool = True) -> list[Job]:
        """Ours alone, the fastest first."""
        jobs = (job for job in self.times if (job.matrix, job.tokens, job.pdl) == (matrix, tokens, pdl) and job.shape)
        return sorted(jobs, key=self.times.__getitem__)


def prove(pool: ProcessPoolExecutor, bench: Bench, jobs: list[Job]) -> list[Job]:
    """Those that are right, in the given order."""
    checked = {found.job: found for found in pool.map(check, jobs, chunksize=2)}
    wrong = [found for found in checked.values() if found.fault]
    for found in checked.values():
        bench.emit(what="check", job=asdict(found.job), error=found.error, fault=found.fault, seconds=found.seconds)
    for found in [w for w in wrong if "OutOfResources" not in w.fault]:
        print(f"WRONG {found.job}: {found.fault} (relative error {found.error:.2e})")
    worst = max((found.error for found in checked.values() if not found.fault), default=0.0)
    print(f"checked {len(jobs)} candidates, {len(wrong)} dropped, largest error of the rest {worst:.1e}", flush=True)
    return [job for job in jobs if not checked[job].fault]


def sweep(bench: Bench, pool: ProcessPoolExecutor, matrices: list[Matrix], tokens: list[int]) -> None:
    sms = num_sms(torch.device("cuda"))
    jobs = [Job(m, t, s) for m in matrices for t in tokens for s in dict.fromkeys(candidates(m, t, sms))]
    jobs = prove(pool, bench, jobs)
    for job in [*(Job(m, t, None) for m in matrices for t in tokens), *jobs]:
        if job.shape is None or not bench.late:
            bench.time(job)
    best = [job for m in matrices for t in tokens for job in bench.ranking(m, t)[:2]]
    varied = [Job(j.matrix, j.tokens, shape, pdl) for j in best for shape, pdl in variations(j.shape)]
    for job in prove(pool, bench, [job for job in dict.fromkeys(varied) if job not in bench.times]):
        if not bench.late:
            bench.time(job)


def report(bench: Bench, matrices: list[Matrix], tokens: list[int]) -> None:
    print("\nmatrix          tokens   torch us    ours us  TB/s  without PDL  launch shape")
    for matrix in matrices:
        for rows in tokens:
            ranking = bench.ranking(matrix, rows)
            if not ranking:
                continue
            us, plain = bench.times[ranking[0]], bench.ranking(matrix, rows, pdl=False)
            tb = 2 * matrix[0] * matrix[1] / us / 1e6
            name = f"{matrix[0]}x{matrix[1]}"
            without = f"{bench.times[plain[0]]:11.2f}" if plain else " " * 11
            library = bench.times[Job(matrix, rows, None)]
            print(f"{name:14} {rows:7} {library:10.2f} {us:10.2f} {tb:5.2f} {without}  {spelled(ranking[0].shape)}")


def best_shape(bench: Bench, matrix: Matrix, tokens: int) -> Shape | None:
    ranking = bench.ranking(matrix, tokens)
    if not ranking or bench.times[ranking[0]] > bench.times[Job(matrix, tokens, None)]:
        return None
    return ranking[0].shape


def spelled(shape: Shape | None) -> str:
    return (
        str(shape) if not isinstance(shape, Dot) else str(shape).replace(repr(shape.early), f"Early.{shape.early.name}")
    )


def table(bench: Bench, matrices: list[Matrix], tokens: list[int]) -> Rows:
    rows: Rows = {}
    for matrix in matrices:
        rows[matrix] = [(most, best_shape(bench, matrix, most)) for most in tokens]
        while rows[matrix] and rows[matrix][-1][1] is None:
            rows[matrix].pop()
    return rows


# 3. The whole chain.


def chain(bench: Bench, model: str, rows: Rows) -> None:
    layers, matrices, head = MODELS[model]
    weights = [values(*m, normal=False) for _ in range(layers) for m in matrices] + [values(*head, normal=False)]
    size = sum(w.numel() for w in weights) * 2
    print(f"\n{model}: all {len(weights)} products, {size / 1e9:.2f} GB, ms (and with a tiny kernel before each)")
    for tokens in CHAIN_TOKENS:
        found = {
            f"{'ours' if ours else 'torch'}{' tiny' if tiny else ''}": chain_ms(
                bench, weights, tokens, rows, ours, tiny
            )
            for ours in (False, True)
            for tiny in (False, True)
        }
        bench.emit(what="chain", model=model, tokens=tokens, **found)
        print(
            f"  {tokens:4} tokens: torch {found['torch']:6.3f} ({found['torch tiny']:6.3f})"
            f"   ours {found['ours']:6.3f} ({found['ours tiny']:6.3f})",
            flush=True,
        )


def chain_ms(bench: Bench, weights: list[Tensor], tokens: int, rows: Rows, ours: bool, tiny: bool) -> float:
    inputs = {w.shape[1]: values(tokens, w.shape[1], normal=False) for w in weights}
    bases = {k: x.clone() for k, x in inputs.items()}

    def work() -> None:
        out = bases[weights[0].shape[1]]
        for weight in weights:
            n, k = weight.shape
            shape = next((s for most, s in rows.get((n, k), []) if tokens <= most), None) if ours else None
            if tiny:
                touch(inputs[k], bases[k], out)
            out = multiply(inputs[k], weight, shape, bench.counters)

    return graph_us(work, 1, 20.0) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", default="8b,smollm2", help="of " + ", ".join(MODELS))
    parser.add_argument("--tokens", default="1,4,8,16,32,64,128", help="numbers of rows to tune for")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds; what does not fit is left out")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--out", type=Path, help="a file for every measurement, as JSON lines")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs an NVIDIA card")
    models, tokens = args.models.split(","), sorted(int(t) for t in args.tokens.split(","))
    matrices = list(dict.fromkeys(m for name in models for m in (*MODELS[name][1], MODELS[name][2])))
    began = time.perf_counter()
    bench = Bench(args.out, began + 0.8 * args.budget)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        sweep(bench, pool, matrices, tokens)
    report(bench, matrices, tokens)
    bench._copies = None
    rows = table(bench, matrices, tokens)
    for model in models:
        chain(bench, model, rows)
    print("\nFor TABLE in plugins/kernels/triton/linear_table.py:")
    for matrix, known in rows.items():
        print(f"        {matrix}: (")
        for most, shape in known:
            print(f"            ({most}, {spelled(shape)}),")
        print("        ),")
    print(f"{'late: some candidates were not timed; ' if bench.late else ''}{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
