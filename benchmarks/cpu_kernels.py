"""Times hotswap's CPU kernels against torch operations, interleaved in one run, and prints tables.

    python benchmarks/cpu_kernels.py [--threads 2] [--rounds 9] [--layers 30] [linear attention calls compile]

The shapes are those of SmolLM2-135M: 30 layers (so that weights come from memory, not from a cache), hidden 576, ffn
1536, 9 query and 3 KV heads of 64. Read the ratios: absolute times depend on what else the machine does. An engine sets
OMP_WAIT_POLICY=passive, which this script does not: set it to see hotswap's numbers as they are there, leave it to see
torch at its best.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from hotswap.core.layers.jit import host_target, stats
from hotswap.core.layers.jit import rope_write_kv as rope
from hotswap.core.layers.jit.paged_cache import PagedCache
from hotswap.plugins.attention.paged_cpu.kernel import PagedAttention, plan_attention
from hotswap.plugins.kernels.llvm_cpu import elementwise
from hotswap.plugins.kernels.llvm_cpu.linear import linear, pack

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
HEADS, KV_HEADS, D, BLOCK = 9, 3, 64, 16


def interleaved(contenders: dict[str, Callable[[], object]], rounds: int, rank: float = 0.5) -> dict[str, float]:
    """Median seconds (or another quantile) of each, measured in turn so that a disturbance hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, function in contenders.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: sorted(t[1:])[int(rounds * rank)] for name, t in times.items()}


def bench_linear(layers: int, rounds: int) -> None:
    print(f"\nlinear, {layers} layers: ms (GFLOP/s)")
    wide = [[torch.randn(n, k) for n, k in SHAPES] for _ in range(layers)]
    half = [[w.bfloat16() for w in layer] for layer in wide]
    ours = {name: [[pack(w) for w in layer] for layer in weights] for name, weights in (("bf16", half), ("f32", wide))}
    for m in (1, 2, 4, 8, 16, 32, 64, 256):
        x = {k: torch.randn(m, k) for k in (576, 1536)}
        x16 = {k: v.bfloat16() for k, v in x.items()}
        out = {n: torch.empty(m, n) for n in (576, 960, 3072)}

        def run_ours(name: str, x: dict[int, torch.Tensor] = x, out: dict[int, torch.Tensor] = out) -> None:
            for layer in ours[name]:
                for packed in layer:
                    linear(x[packed.k], packed, None, out[packed.n])

        def run_torch(weights: list[list[torch.Tensor]], x: dict[int, torch.Tensor]) -> None:
            for layer in weights:
                for w in layer:
                    F.linear(x[w.shape[1]], w)

        contenders: dict[str, Callable[[], object]] = {
            "hotswap bf16": lambda: run_ours("bf16"),
            "hotswap f32": lambda: run_ours("f32"),
            "torch f32": lambda x=x: run_torch(wide, x),
        }
        if m <= 2:
            contenders["torch bf16"] = lambda x16=x16: run_torch(half, x16)
        if torch.backends.mkldnn.is_available():
            reordered = [[torch.ops.mkldnn._reorder_linear_weight(w, m) for w in layer] for layer in wide]

            def run_mkldnn(x: dict[int, torch.Tensor] = x, reordered: list[list[torch.Tensor]] = reordered) -> None:
                for layer, packed in zip(wide, reordered, strict=True):
                    for w, p in zip(layer, packed, strict=True):
                        torch.ops.mkldnn._linear_pointwise(x[w.shape[1]], p, None, "none", [], "")

            contenders["mkldnn f32"] = run_mkldnn
        flops = 2 * m * sum(n * k for n, k in SHAPES) * layers
        result = interleaved(contenders, rounds if m < 64 else 3)
        print(f"M={m:4d}  " + "  ".join(f"{n} {t * 1e3:6.1f} ({flops / t / 1e9:3.0f})" for n, t in result.items()))


def bench_attention(layers: int, rounds: int) -> None:
    print(
        "\nattention, one layer: ms (torch: scaled_dot_product_attention on a dense copy, the head group as query rows)"
    )
    for sequences, context, queries in ((1, 512, 1), (8, 512, 1), (32, 512, 1), (1, 4096, 1), (1, 512, 512)):
        blocks = -(-context // BLOCK)
        total = sequences * blocks + 1
        count = layers if queries == 1 else 2
        caches = {
            dtype: [
                PagedCache.of(
                    torch.randn(total, KV_HEADS, D, BLOCK).to(dtype), torch.randn(total, KV_HEADS, BLOCK, D).to(dtype)
                )
                for _ in range(count)
            ]
            for dtype in (torch.bfloat16, torch.float32)
        }
        table = (torch.randperm(total - 1) + 1).int().view(sequences, blocks)
        starts, lengths = (torch.arange(sequences + 1) * queries).int(), torch.full((sequences,), context).int()
        q = torch.randn(sequences * queries, HEADS, D)
        out = torch.empty_like(q)
        plan = plan_attention(starts, lengths, table, HEADS // KV_HEADS)
        kernels = {
            dtype: [PagedAttention(HEADS, c, D**-0.5, torch.float32) for c in cs] for dtype, cs in caches.items()
        }
        dense = [torch.randn(2, sequences, KV_HEADS, context, D) for _ in range(count)]
        rows = q.view(sequences, queries, KV_HEADS, -1, D).permute(0, 2, 3, 1, 4).reshape(sequences, KV_HEADS, -1, D)

        def run(dtype: torch.dtype, kernels: dict[torch.dtype, list[PagedAttention]] = kernels) -> None:
            for kernel in kernels[dtype]:
                kernel(q, plan, out)  # noqa: B023 - called within this iteration

        def run_torch(dense: list[torch.Tensor] = dense, rows: torch.Tensor = rows) -> None:
            for k, v in dense:
                F.scaled_dot_product_attention(rows, k, v)

        result = interleaved(
            {
                "hotswap bf16": lambda: run(torch.bfloat16),
                "hotswap f32": lambda: run(torch.float32),
                "torch f32": run_torch,
            },
            rounds,
        )
        line = "  ".join(f"{n} {t / count * 1e3:7.3f}" for n, t in result.items())
        print(f"batch {sequences:2d} context {context:4d} queries {queries:3d}  {line}")


def bench_calls(rounds: int) -> None:
    """What a call costs when there is next to nothing to compute: Python, ctypes, and a tiny kernel."""
    print("\none call with tiny tensors: microseconds, the best of several hundred calls each")
    x, y, weight, out, gate_up = (
        torch.randn(1, 16),
        torch.randn(1, 16),
        torch.randn(16),
        torch.empty(1, 16),
        torch.randn(1, 32),
    )
    packed = pack(torch.randn(16, 16))
    qkv = torch.randn(1, 15 * 16)
    cache = PagedCache.of(torch.zeros(4, 3, 16, 16), torch.zeros(4, 3, 16, 16))
    position, slot, cos_sin = torch.zeros(1, dtype=torch.int64), torch.tensor([17]), torch.ones(8, 16)
    q, k, v = qkv.view(1, 15, 16).split_with_sizes((9, 3, 3), 1)
    keys, values = cache.key_cache.permute(0, 3, 1, 2), cache.value_cache.permute(0, 2, 1, 3)
    attend = PagedAttention(9, cache, 0.25, torch.float32)
    starts, lengths, table = torch.tensor([0, 1]).int(), torch.tensor([1]).int(), torch.ones(1, 4, dtype=torch.int32)
    plan, attended = plan_attention(starts, lengths, table, 3), torch.empty(1, 144)
    calls: dict[str, Callable[[], object]] = {
        "linear": lambda: linear(x, packed, None, out),
        "rms_norm": lambda: elementwise.rms_norm(x, weight, 1e-5, out),
        "add_rms_norm": lambda: elementwise.add_rms_norm(x, y, weight, 1e-5, out),
        "silu_mul": lambda: elementwise.silu_mul(gate_up, out),
        "rope_write_kv": lambda: rope.rope_write_kv(q, k, v, position, cos_sin, keys, values, slot),
        "PagedAttention": lambda: attend(qkv, plan, attended),
        "plan_attention (once a step)": lambda: plan_attention(starts, lengths, table, 3),
        "torch F.linear": lambda: F.linear(x, packed.panels[0]),
        "torch F.silu": lambda: F.silu(x),
    }

    def repeated(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            for _ in range(200):
                call()

        return run

    for name, seconds in interleaved({name: repeated(call) for name, call in calls.items()}, 5 * rounds, 0).items():
        print(f"{name:30s} {seconds / 200 * 1e6:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("parts", nargs="*", default=["linear", "attention", "calls", "compile"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = host_target()
    print(f"{target.cpu}, {target.width} lanes, {options.threads} threads, torch {torch.__version__}")
    print(f"load at the start {os.getloadavg()[0]:.1f}")
    if "linear" in options.parts:
        bench_linear(options.layers, options.rounds)
    if "attention" in options.parts:
        bench_attention(options.layers, options.rounds)
    if "calls" in options.parts:
        bench_calls(options.rounds)
    if "compile" in options.parts:
        print(f"\ncompiled {stats.modules} modules in {stats.seconds:.2f} s")
        for name, seconds in stats.by_name.items():
            print(f"{name:40s} {seconds * 1e3:6.0f} ms")
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
