#!/usr/bin/env python3
"""The elementwise kernels of `triton` on a card: are they right, and how close to the memory's speed are they?

    PYTHONPATH=src python benchmarks/gpu/elementwise.py [--models 8b,smollm2] [--rows 1,64,...] [--sweep] [--out x.jsonl]

1. Every op is compared with the torch reference in float64 on the CPU: fresh random inputs, poisoned memory for outputs.
2. Each op is timed as a chain of launches in one CUDA graph, each on buffers of its own so that together they do not fit
   the L2 cache, with programmatic dependent launch and without. Microseconds are of one launch in the chain; GB/s counts
   what the op must read and write.
3. `--sweep` also varies how many elements a thread takes and how large a program's piece is.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotswap.core.layers import reference
from hotswap.core.layers.step_inputs import step_inputs as reference_step_inputs
from hotswap.plugins.kernels.triton import activation, norm, rope, step_inputs

EPS = 1e-5
BLOCK_SIZE = 16
L2_BYTES = 64 << 20
MAX_CHAIN, MIN_CHAIN = 64, 8
REPLAYS = 7
POSITIONS = 8192


@dataclass(frozen=True)
class Model:
    """hidden, intermediate: widths. heads, kv_heads, head_dim: of attention."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


MODELS = {"8b": Model(4096, 14336, 32, 8, 128), "smollm2": Model(576, 1536, 9, 3, 64)}


@dataclass
class Chain:
    """launch(copy, pdl) launches the op on one of the copies of its buffers; moved: bytes that one launch reads and
    writes."""

    op: str
    moved: int
    copies: int
    launch: Callable[[int, bool], Any]
    kept: list[Any] = field(default_factory=list)


def copies_for(moved: int) -> int:
    """So many buffers that they do not stay in L2, but no more than a graph of reasonable length has launches."""
    return min(MAX_CHAIN, max(MIN_CHAIN, 2 * L2_BYTES // moved))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def fused(model: Model, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of a fused projection."""
    heads = (model.heads, model.kv_heads, model.kv_heads)
    q, k, v = random(rows, sum(heads), model.head_dim).split_with_sizes(heads, 1)
    return q, k, v


def cache(model: Model, rows: int) -> tuple[Tensor, Tensor]:
    blocks = rows // BLOCK_SIZE + 2
    shape = (blocks, BLOCK_SIZE, model.kv_heads, model.head_dim)
    return random(*shape), random(*shape)


def chains(model: Model, rows: int) -> Iterator[Chain]:
    hidden, weight = rows * model.hidden * 2, random(model.hidden)

    def norm_chain(copies: int) -> Chain:
        xs = [random(rows, model.hidden) for _ in range(copies)]
        return Chain("rms_norm", 2 * hidden, copies, lambda at, pdl: norm.rms_norm(xs[at], weight, EPS, pdl=pdl))

    def add_chain(copies: int) -> Chain:
        pairs = [(random(rows, model.hidden), random(rows, model.hidden)) for _ in range(copies)]
        return Chain(
            "add_rms_norm", 4 * hidden, copies, lambda at, pdl: norm.add_rms_norm(*pairs[at], weight, EPS, pdl=pdl)
        )

    def gated_chain(copies: int) -> Chain:
        inputs = [random(rows, 2 * model.intermediate) for _ in range(copies)]
        moved = 3 * rows * model.intermediate * 2
        return Chain("silu_mul", moved, copies, lambda at, pdl: activation.silu_mul(inputs[at], pdl=pdl))

    yield norm_chain(copies_for(2 * hidden))
    yield add_chain(copies_for(4 * hidden))
    yield gated_chain(copies_for(3 * rows * model.intermediate * 2))
    yield rope_chain(model, rows)
    yield step_chain(rows)


def rope_chain(model: Model, rows: int) -> Chain:
    per_token = (2 * model.heads + 4 * model.kv_heads) * model.head_dim * 2
    copies = copies_for(rows * per_token)
    inputs = [(fused(model, rows), cache(model, rows)) for _ in range(copies)]
    positions = torch.randint(0, POSITIONS, (rows,), device="cuda")
    slots = torch.randperm(rows + BLOCK_SIZE, device="cuda")[:rows]
    angles = random(POSITIONS, model.head_dim, dtype=torch.float32)

    def launch(at: int, pdl: bool) -> None:
        projection, kv = inputs[at]
        rope.rope_write_kv(*projection, positions, angles, *kv, slots, pdl=pdl)

    return Chain("rope_write_kv", rows * per_token, copies, launch, kept=[inputs, positions, slots, angles])


def step_arguments(rows: int, tokens_each: int, width: int = 512) -> list[Any]:
    """Of a step in which each row has so many tokens."""
    device, tokens = "cuda", rows * tokens_each
    slots = torch.randperm(rows, device=device).to(torch.int32)
    starts = torch.arange(0, tokens + 1, tokens_each, device=device, dtype=torch.int32)
    computed = torch.randint(0, 1000, (rows,), device=device)
    ids = torch.randint(0, 50_000, (rows, 1100 + 20 * tokens_each), device=device, dtype=torch.int32)
    columns = max(width, ids.shape[1] // BLOCK_SIZE + 1)
    table = torch.randint(0, 1 << 20, (rows, columns), device=device, dtype=torch.int32)
    whole = [torch.full((tokens,), 77, device=device) for _ in range(3)]
    lengths = torch.full((rows,), 77, device=device, dtype=torch.int32)
    copied = torch.full((rows, width), 77, device=device, dtype=torch.int32)
    return [slots, starts, computed, ids, (table,), BLOCK_SIZE, whole[0], whole[1], lengths, (whole[2],), (copied,)]


def step_chain(rows: int) -> Chain:
    """Decode; more than 256 rows count as rows of one prompt."""
    arguments = step_arguments(rows, 1) if rows <= 256 else step_arguments(1, rows)

    def launch(at: int, pdl: bool) -> None:
        if at == 0:
            arguments[2].zero_()  # the timed graph must not run out of tokens
        step_inputs.step_inputs(*arguments, pdl=pdl)

    requests = len(arguments[0])
    return Chain("step_inputs", rows * 28 + requests * 512 * 8, MIN_CHAIN, launch, kept=arguments)


# Correctness


def poison() -> None:
    """Memory that the next outputs get holds NaN."""
    for size in (1 << 12, 1 << 18, 1 << 24):
        torch.full((size,), float("nan"), device="cuda")


def agree(name: str, found: Tensor, wanted: Tensor, tolerance: float = 2.0**-7) -> None:
    found, wanted = found.cpu().double(), wanted.cpu().double()
    error = (found - wanted).abs() - tolerance * wanted.abs()
    if not bool((error <= 1e-3 * tolerance).all()):
        raise SystemExit(f"{name}: wrong, by up to {float((found - wanted).abs().max())}")


def check(model: Model, rows: int, pdl: bool) -> None:
    """Raises SystemExit when an op is wrong. Rounding to bfloat16 once or twice is allowed."""
    x, residual, weight = random(rows, model.hidden), random(rows, model.hidden), random(model.hidden)
    wide = [t.cpu().double() for t in (x, residual, weight)]

    def exact_norm(value: Tensor) -> Tensor:
        return value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + EPS) * wide[2]

    poison()
    agree("rms_norm", norm.rms_norm(x, weight, EPS, pdl=pdl), exact_norm(wide[0]), 2.0**-6)
    poison()
    total = x + residual
    normed = norm.add_rms_norm(x, residual, weight, EPS, pdl=pdl)
    if not torch.equal(residual, total):
        raise SystemExit("add_rms_norm: the residual is not the rounded sum")
    agree("add_rms_norm", normed, exact_norm(total.cpu().double()), 2.0**-6)
    gate_up = 4 * random(rows, 2 * model.intermediate)
    gate, up = gate_up.cpu().double().chunk(2, 1)
    poison()
    agree("silu_mul", activation.silu_mul(gate_up, pdl=pdl), torch.nn.functional.silu(gate) * up)
    poison()
    wanted = torch.nn.functional.gelu(gate, approximate="tanh") * up
    agree("gelu_tanh_mul", activation.gelu_tanh_mul(gate_up, pdl=pdl), wanted)
    check_rope(model, rows, pdl)
    for requests, each in ((rows, 1), (1, rows)) if rows <= 256 else ((1, rows),):
        arguments = step_arguments(requests, each)
        others = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        for at in (9, 10):
            others[at] = (arguments[at][0].clone(),)
        step_inputs.step_inputs(*arguments, pdl=pdl)
        reference_step_inputs(*others)
        for at in (2, 6, 7, 8):
            agree(f"step_inputs, argument {at}", arguments[at], others[at], 0.0)
        for at in (9, 10):
            agree(f"step_inputs, argument {at}", arguments[at][0], others[at][0], 0.0)


def check_rope(model: Model, rows: int, pdl: bool) -> None:
    projection, kv = fused(model, rows), cache(model, rows)
    positions = torch.randint(0, POSITIONS, (rows,), device="cuda")
    slots = torch.randperm(rows + BLOCK_SIZE, device="cuda")[:rows]
    slots[rows // 2] = -1
    angles = random(POSITIONS, model.head_dim, dtype=torch.float32)
    again = [t.clone() for t in (*projection, *kv)]
    rope.rope_write_kv(*projection, positions, angles, *kv, slots, pdl=pdl)
    reference.rope_write_kv(*again[:3], positions, angles, *again[3:], slots)
    # Where two products cancel, one rounding of each is large beside the result.
    for name, found, wanted in zip(("q", "keys", "values"), (projection[0], *kv), (again[0], *again[3:]), strict=True):
        near = (found.float() - wanted.float()).abs() <= 2.0**-7 * wanted.float().abs() + 1e-5
        if not bool(near.all()):
            raise SystemExit(f"rope_write_kv: {name} is wrong")


# Time


def microseconds(chain: Chain, pdl: bool) -> float:
    """Of one launch of the chain: the median of several replays of a graph of them all."""
    chain.launch(0, pdl)  # compiled outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [chain.launch(at, pdl) for at in range(chain.copies)]
    times: list[float] = []
    for replay in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay >= 2:
            times.append(start.elapsed_time(end) * 1000 / chain.copies)
    del graph, kept
    return statistics.median(times)


def report(row: dict[str, Any], out: Path | None) -> None:
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def measure(name: str, model: Model, rows: int, modes: list[bool], out: Path | None, **settings: int) -> None:
    for chain in chains(model, rows):
        row: dict[str, Any] = {"model": name, "rows": rows, "op": chain.op, **settings}
        for pdl in modes:
            time = microseconds(chain, pdl)
            label = "pdl" if pdl else "plain"
            row[f"us_{label}"], row[f"gb_s_{label}"] = round(time, 2), round(chain.moved / time / 1000)
        report(row, out)


def sweep(name: str, model: Model, rows: int, modes: list[bool], out: Path | None) -> None:
    """Other sizes of programs than the modules' own."""
    before = (norm.PER_THREAD, activation.BLOCK, activation.PER_THREAD, rope.TILE, rope.PER_THREAD)
    for norm_elements, block, elements, tile in ((8, 512, 8, 256), (32, 2048, 8, 1024), (16, 2048, 16, 512)):
        norm.PER_THREAD, activation.BLOCK, activation.PER_THREAD, rope.TILE = norm_elements, block, elements, tile
        settings = {"norm_elements": norm_elements, "block": block, "elements": elements, "rope_tile": tile}
        measure(name, model, rows, modes, out, **settings)
    norm.PER_THREAD, activation.BLOCK, activation.PER_THREAD, rope.TILE, rope.PER_THREAD = before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,smollm2")
    parser.add_argument("--rows", default="1,64,256,2048,8192")
    parser.add_argument("--sweep", action="store_true", help="other sizes of programs too")
    parser.add_argument("--out", type=Path, help="a file that gets a JSON line for each row")
    options = parser.parse_args()
    rows = [int(number) for number in options.rows.split(",")]
    torch.manual_seed(0)
    hopper = torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)
    modes = [False, True] if hopper else [False]
    for name in options.models.split(","):
        for count in (1, 3, 64, 257):
            for pdl in modes:
                check(MODELS[name], count, pdl)
    print(f"{torch.cuda.get_device_name()}: every op is right at 1, 3, 64 and 257 rows", flush=True)
    for name in options.models.split(","):
        for count in rows:
            measure(name, MODELS[name], count, modes, options.out)
            if options.sweep:
                sweep(name, MODELS[name], count, modes, options.out)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
