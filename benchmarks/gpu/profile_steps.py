#!/usr/bin/env python3
"""Where a steady decode step goes: time by kernel, launches, how long the device is idle, and its largest gaps.

    PYTHONPATH=src python benchmarks/gpu/profile_steps.py --shape llama8b --batches 1,64,256 [--context 512] [--out FILE]

Runs the offline engine with dummy weights (as compare.py does) and profiles `--steps` decode steps in the middle of a
generation. Idle is the share of the profiled interval in which no kernel and no copy ran on the device. A gap is one
stretch of it. Collections of Python's garbage collector during those steps are counted, since each holds up the host.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import workloads as W

from hotswap import LLM, SamplingParams

WARM_UP_STEPS = 24
LARGEST_GAPS = 5


def device_events(path: Path) -> list[dict[str, Any]]:
    """Kernels and copies of a trace file, in order of their start (microseconds)."""
    events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])


@dataclass(frozen=True)
class Gap:
    """A stretch in which nothing ran on the device."""

    ms: float
    at_ms: float  # its begin, since the first event
    step: int  # of the profile, from 0: the launches counted into as many equal parts as there are steps
    before: str  # what ended last
    after: str  # what started next


def gaps(events: list[dict[str, Any]], steps: int) -> Iterator[Gap]:
    """In order of time. Events may overlap: a gap begins where the last of those so far has ended."""
    start = events[0]["ts"]
    last = events[0]
    for index, event in enumerate(events):
        end = last["ts"] + last["dur"]
        if event["ts"] > end:
            names = short_name(last), short_name(event)
            yield Gap((event["ts"] - end) / 1e3, (end - start) / 1e3, index * steps // len(events), *names)
        if event["ts"] + event["dur"] > end:
            last = event


def span_ms(events: list[dict[str, Any]]) -> float:
    """From the first event's start to the end of whichever ends last."""
    return float(max(event["ts"] + event["dur"] for event in events) - events[0]["ts"]) / 1e3


def short_name(event: dict[str, Any]) -> str:
    return str(event["name"])[:90]


class Collections:
    """Python's garbage collections between start() and stop(), by generation. `step` is to be set to the step being run."""

    def __init__(self) -> None:
        self.step = 0
        self._found: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self._began = 0.0

    def start(self) -> None:
        gc.callbacks.append(self._called)

    def stop(self) -> None:
        gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._found[info["generation"]].append(((time.perf_counter() - self._began) * 1e3, self.step))

    def rows(self) -> list[dict[str, Any]]:
        """One per generation that was collected. Steps are the host's: it may be one ahead of the device."""
        return [
            {
                "generation": generation,
                "count": len(found),
                "ms": round(sum(ms for ms, _ in found), 3),
                "longest_ms": round(max(found)[0], 3),
                "longest_at_step": max(found)[1],
            }
            for generation, found in sorted(self._found.items())
        ]


def profile(
    llm: Any, prompts: list[list[int]], steps: int, folder: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Device events of `steps` decode steps, and Python's garbage collections during them."""
    params = SamplingParams(temperature=0.0, max_tokens=WARM_UP_STEPS + steps + 24, ignore_eos=True, detokenize=False)
    step = llm._engine.core.step
    count = 0
    collections = Collections()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def counted() -> Any:
        nonlocal count
        count += 1
        if count == WARM_UP_STEPS:
            torch.cuda.synchronize()
            profiler.start()
            collections.start()
        if count == WARM_UP_STEPS + steps:
            torch.cuda.synchronize()
            collections.stop()
            profiler.stop()
        collections.step = count - WARM_UP_STEPS
        return step()

    llm._engine.core.step = counted
    try:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    finally:
        llm._engine.core.step = step
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    return device_events(path), collections.rows()


def profile_prefill(llm: Any, num_tokens: int, vocab: int, folder: Path) -> list[dict[str, Any]]:
    """Device events of one request's prefill, the prefix cache empty."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    for seed in (1, 2):
        llm.generate([{"prompt_token_ids": W.random_prompts(1, num_tokens, vocab, seed)[0]}], params, use_tqdm=False)
    prompt = W.random_prompts(1, num_tokens, vocab, 3)[0]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        torch.cuda.synchronize()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    return device_events(path)


def profile_host(llm: Any, prompts: list[list[int]], steps: int) -> None:
    """What the host does during steady decode, by function: cProfile's own overhead is in it."""
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, detokenize=False)
    profiler = cProfile.Profile()
    profiler.enable()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    profiler.disable()
    print(f"\nhost, batch {len(prompts)}, {steps} steps")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(24)


def report(
    batch: int, events: list[dict[str, Any]], steps: int, top: int, collections: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Prints it. Returns the row for --out."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in events:
        by_name[short_name(event)].append(event["dur"])
    found = list(gaps(events, steps))
    wall = span_ms(events) / steps
    idle = sum(gap.ms for gap in found) / span_ms(events)
    print(f"\nbatch {batch}: {wall:.3f} ms a step, {len(events) / steps:.0f} launches, device idle {100 * idle:.2f} %")
    kernels = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]
    for name, times in kernels:
        print(
            f"  {sum(times) / 1e3 / steps:8.3f} ms {len(times) / steps:7.1f} x {sum(times) / len(times):8.2f} us  {name}"
        )
    largest = sorted(found, key=lambda gap: -gap.ms)[:LARGEST_GAPS]
    for gap in largest:
        print(f"  gap of {gap.ms:.3f} ms in step {gap.step}, at {gap.at_ms:.2f} ms: {gap.before} -> {gap.after}")
    for row in collections or []:
        print(
            f"  garbage collections of generation {row['generation']}: {row['count']}, {row['ms']:.2f} ms in all,"
            f" the longest {row['longest_ms']:.2f} ms in step {row['longest_at_step']}"
        )
    return {
        "batch": batch,
        "step_ms": round(wall, 4),
        "idle": round(idle, 4),
        "kernels": {name: [round(sum(t) / 1e3 / steps, 4), round(len(t) / steps, 2)] for name, t in kernels},
        "gaps": [asdict(gap) | {"ms": round(gap.ms, 4), "at_ms": round(gap.at_ms, 3)} for gap in largest],
        "collections": collections or [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama8b", choices=sorted(W.SHAPES))
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--prefill", type=int, help="profile the prefill of so many tokens too")
    parser.add_argument("--host", action="store_true", help="profile the host with cProfile too")
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--args", default="{}", help="more LLM arguments, JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(W.SHAPES[args.shape]))
        options: dict[str, Any] = {
            "model": name,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "max_num_seqs": 256,
            **json.loads(args.args),
        }
        llm = LLM(**options)
        vocab = W.SHAPES[args.shape]["vocab_size"]
        for batch in map(int, args.batches.split(",")):
            prompts = W.random_prompts(batch, args.context, vocab, 300 + batch)
            events, collections = profile(llm, prompts, args.steps, folder)
            row = report(batch, events, args.steps, args.top, collections)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps({"what": "profile", "shape": args.shape, **row}) + "\n")
            if args.host:
                profile_host(llm, prompts, 4 * args.steps)
        if args.prefill:
            print(f"\nprefill of {args.prefill} tokens:", end="")
            report(1, profile_prefill(llm, args.prefill, vocab, folder), 1, args.top)
        llm.shutdown()


if __name__ == "__main__":
    main()
