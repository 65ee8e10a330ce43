#!/usr/bin/env python3
"""GB/s at which a real checkpoint comes from a warm page cache onto the GPU.

    PYTHONPATH=src python benchmarks/gpu/load.py /dev/shm/llama8b [--out load.jsonl]

Writes a bf16 safetensors checkpoint of the Llama-3.1-8B shape (16.06 GB, four shards, random bits) into the folder, unless it
is there. Then tensors are loaded and compared bit for bit; what limits a load is measured: reading into host memory with as
many threads, copying from pinned memory; the loader is timed, the first load of a process (which reads the files once and pins
the buffers) apart from the best of the rest, for each number of readers and each buffer size asked for; so is the way without
staging (tensors of the mapped file, copied one by one); and the engine loads it, its other parts left small.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from workloads import SHAPES

from hotswap.plugins.loaders.safetensors import INDEX, SafetensorsCheckpoint, SafetensorsLoader
from hotswap.plugins.loaders.staging import CudaUploader, staged

BLOCK_BYTES = 64 << 20
TOY = {
    **SHAPES["llama8b"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


class DeviceOfHost(CudaUploader):
    """The same path without a GPU: for trying this script out, not for measuring."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def fence(self) -> DeviceOfHost:
        return self

    def synchronize(self) -> None:
        """Copies are done when they return."""


# The checkpoint.


def tensor_shapes(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor of an untied llama, in the order in which checkpoints hold them."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = [
        ("input_layernorm", (hidden,)),
        ("mlp.down_proj", (hidden, inner)),
        ("mlp.gate_proj", (inner, hidden)),
        ("mlp.up_proj", (inner, hidden)),
        ("post_attention_layernorm", (hidden,)),
        ("self_attn.k_proj", (keys, hidden)),
        ("self_attn.o_proj", (hidden, queries)),
        ("self_attn.q_proj", (queries, hidden)),
        ("self_attn.v_proj", (keys, hidden)),
    ]
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab, hidden))]
    for index in range(config["num_hidden_layers"]):
        shapes += [(f"model.layers.{index}.{name}.weight", shape) for name, shape in layer]
    return [*shapes, ("model.norm.weight", (hidden,)), ("lm_head.weight", (vocab, hidden))]


def random_block() -> bytes:
    """Random signs, fractions and the lower part of the exponents: finite bf16 values of magnitude 2^-15 to 2."""
    bits = np.frombuffer(np.random.default_rng(0).bytes(BLOCK_BYTES), np.uint16)
    return ((bits & 0x87FF) | 0x3800).tobytes()


def content(block: bytes, name: str, num_bytes: int) -> Iterator[memoryview]:
    """The bytes of a tensor: the block again and again, from a place that the name decides."""
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % len(block) // 2 * 2
    while num_bytes:
        part = memoryview(block)[place : place + num_bytes]
        yield part
        num_bytes -= len(part)
        place = 0


def write_shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], block: bytes) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors:
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors:
            for part in content(block, name, 2 * math.prod(shape)):
                while part:
                    part = part[file.write(part) or 0 :]


def write_checkpoint(folder: Path, config: dict[str, Any], num_shards: int, block: bytes) -> None:
    """config.json last: a folder that has it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensor_shapes(config)
    total = sum(2 * math.prod(shape) for _, shape in tensors)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(num_shards)]
    done = 0
    for name, shape in tensors:
        shards[min(num_shards - 1, done * num_shards // total)].append((name, shape))
        done += 2 * math.prod(shape)
    names = [f"model-{n:05}-of-{num_shards:05}.safetensors" for n in range(1, num_shards + 1)]
    with ThreadPoolExecutor(num_shards) as pool:
        list(pool.map(lambda n: write_shard(folder / names[n], shards[n], block), range(num_shards)))
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _ in shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def prepare(folder: Path, config: dict[str, Any], num_shards: int, block: bytes) -> float:
    """Seconds that the writing took; 0 when it was there."""
    written = folder / "config.json"
    if written.is_file():
        if json.loads(written.read_text()) != config:
            raise SystemExit(f"{folder} holds another model; name another folder")
        return 0.0
    began = time.perf_counter()
    write_checkpoint(folder, config, num_shards, block)
    return time.perf_counter() - began


# What is measured. Each of these gives seconds.


def timed(device: torch.device, run: Callable[[], None]) -> float:
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def drain(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for _ in tensors:
        pass


def read_all(checkpoint: SafetensorsCheckpoint, buffers: list[bytearray]) -> None:
    """Every byte, with a thread for each buffer."""
    parts: list[tuple[Path, int]] = []
    for path in {tensor.path for tensor in checkpoint.stored_tensors()}:
        parts += [(path, start) for start in range(0, path.stat().st_size, len(buffers[0]))]

    def read(share: int) -> None:
        for path, start in parts[share :: len(buffers)]:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                file.readinto(buffers[share])

    with ThreadPoolExecutor(len(buffers)) as pool:
        list(pool.map(read, range(len(buffers))))


def pinned_copy_gb_per_s(device: torch.device) -> float:
    num_bytes = 256 << 20
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).random_()
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def copies() -> None:
        for _ in range(8):
            target.copy_(source, non_blocking=True)

    copies()
    return 8 * num_bytes / timed(device, copies) / 1e9


def check(checkpoint: SafetensorsCheckpoint, loaded: Iterable[tuple[str, torch.Tensor]], block: bytes) -> int:
    """How many tensors were compared: every eleventh, with the first and the last. Exits when one is not as it was written."""
    stored = checkpoint.stored_tensors()
    wanted = {tensor.name: tensor for tensor in [*stored[::11], stored[-1]]}
    names = []
    for name, tensor in loaded:
        names.append(name)
        if name in wanted:
            found = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
            expected = b"".join(content(block, name, wanted[name].num_bytes))
            if not np.array_equal(found, np.frombuffer(expected, np.uint8)):
                raise SystemExit(f"{name} did not arrive as it was written")
    if names != checkpoint.weight_names():
        raise SystemExit("tensors are missing, or come in another order than they are stored in")
    return len(wanted)


def engine_seconds(folder: Path, device: str, settings: dict[str, Any]) -> float:
    """What the engine calls weights: reading, uploading, fusing and packing."""
    from hotswap import LLM

    llm = LLM(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", plugins=[f"platform={device}"], **settings)
    seconds = float(llm.info.startup_seconds["weights"])
    llm.shutdown()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="where the checkpoint is, or comes to lie: /dev/shm/NAME, or on a disk"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--toy", action="store_true", help="a tiny model instead of the 8B shape")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--readers", default="8", help="reading threads to try, separated by commas")
    parser.add_argument("--buffer-mib", default="16", help="buffer sizes to try, separated by commas")
    parser.add_argument("--skip-old", action="store_true", help="do not time the way without staging")
    parser.add_argument("--skip-engine", action="store_true", help="do not let the engine load it")
    parser.add_argument(
        "--llm",
        type=json.loads,
        default={"max_model_len": 4096, "max_num_seqs": 8, "enforce_eager": True},
        help="the engine's settings, JSON",
    )
    parser.add_argument("--out", type=Path, help="append the rows as JSON lines")
    a = parser.parse_args()
    device = torch.device(a.device)
    config = dict(TOY if a.toy else SHAPES["llama8b"])
    block = random_block()
    writing = prepare(a.folder, config, a.shards, block)
    checkpoint = SafetensorsLoader().open(a.folder)
    gigabytes = checkpoint.total_bytes / 1e9
    rows: list[dict[str, Any]] = []

    def emit(what: str, gb_per_s: float, seconds: float | None = None) -> None:
        row: dict[str, Any] = {"what": what, "gb": round(gigabytes, 3), "gb_per_s": round(gb_per_s, 2)}
        if seconds is not None:
            row["seconds"] = round(seconds, 3)
        rows.append(row)
        print(f"{what:<52} {gb_per_s:8.2f} GB/s" + (f" {seconds:9.3f} s" if seconds is not None else ""), flush=True)
        if a.out is not None:
            with a.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"benchmark": "load", "device": a.device, **row}) + "\n")

    uploader = CudaUploader(device) if device.type == "cuda" else DeviceOfHost(device)
    stored = checkpoint.stored_tensors()
    print(f"{a.folder}: {gigabytes:.2f} GB in {a.shards} files, {len(stored)} tensors")
    if writing:
        emit("written", gigabytes / writing, writing)
    readers = [int(number) for number in a.readers.split(",")]
    if device.type == "cuda":
        torch.zeros(1, device=device)
    seconds = timed(device, lambda: drain(checkpoint.uploaded(uploader, torch.bfloat16)))
    emit("first load of the process, pinning included", gigabytes / seconds, seconds)
    print(
        f"{check(checkpoint, checkpoint.uploaded(uploader, torch.bfloat16), block)} tensors are bit for bit as written"
    )
    for threads in readers:
        buffers = [bytearray(b"\1") * min(32 << 20, checkpoint.total_bytes) for _ in range(threads)]  # pages are there
        seconds = min(timed(device, lambda: read_all(checkpoint, buffers)) for _ in range(2))  # noqa: B023
        emit(f"reading into host memory, {threads} threads", gigabytes / seconds, seconds)
    if device.type == "cuda":
        emit("copying from pinned memory", pinned_copy_gb_per_s(device))
    for threads, mib in product(readers, [int(number) for number in a.buffer_mib.split(",")]):
        times = [
            timed(device, lambda: drain(staged(stored, uploader, buffer_bytes=mib << 20, threads=threads)))  # noqa: B023
            for _ in range(a.reps)
        ]
        emit(f"staged, {threads} readers, {mib} MiB buffers, best of {a.reps}", gigabytes / min(times), min(times))
    if not a.skip_old:
        moved = ((name, tensor.to(device)) for name, tensor in checkpoint.weights(torch.bfloat16))
        seconds = timed(device, lambda: drain(moved))
        emit("without staging", gigabytes / seconds, seconds)
    checkpoint.close()
    if not a.skip_engine:
        seconds = engine_seconds(a.folder, a.device, a.llm)
        emit("the engine: read, uploaded, fused", gigabytes / seconds, seconds)


if __name__ == "__main__":
    main()
