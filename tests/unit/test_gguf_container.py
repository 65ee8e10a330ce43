"""The GGUF reader against well-formed, hostile and randomly damaged files."""

from __future__ import annotations

import random
import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotswap.core.contracts.loader import ModelLoadError
from hotswap.plugins.loaders.gguf import GGUFLoader
from hotswap.plugins.loaders.gguf_container import MAX_STRING_BYTES, GGUFFile

U32, I32, STRING, ARRAY = 4, 5, 8, 9


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(pairs: list[bytes], infos: list[bytes], data: bytes = b"", alignment: int = 32, **header: int) -> bytes:
    counts = {"version": 3, "tensors": len(infos), "num_pairs": len(pairs), **header}
    head = b"GGUF" + struct.pack("<IQQ", counts["version"], counts["tensors"], counts["num_pairs"])
    body = head + b"".join(pairs) + b"".join(infos)
    return body + b"\0" * (-len(body) % alignment) + data


def read(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


TWO = [tensor("a", [4], 0, 0), tensor("b", [2, 3], 0, 32)]
DATA = np.arange(14, dtype="<f4").tobytes()


def test_reads_values_and_tensors(tmp_path: Path) -> None:
    pairs = [
        pair("text", STRING, string("h\u00e9")),
        pair("small", U32, u32(7)),
        pair("list", ARRAY, struct.pack("<IQ", I32, 3) + struct.pack("<3i", -1, 0, 1)),
        pair("words", ARRAY, struct.pack("<IQ", STRING, 2) + string("a") + string("")),
        pair("flag", 7, b"\1"),
        pair("flags", ARRAY, struct.pack("<IQ", 7, 2) + b"\0\1"),
        pair("real", 6, struct.pack("<f", 0.5)),
    ]
    file = read(tmp_path, build(pairs, TWO, DATA))
    assert file.metadata["text"] == "h\u00e9" and file.metadata["words"] == ["a", ""]
    assert (file.metadata["flag"], file.metadata["flags"], file.metadata["real"]) == (True, [False, True], 0.5)
    assert list(file.metadata["list"]) == [-1, 0, 1]  # type: ignore[arg-type]
    assert file.get("small", int) == 7 and file.get("small", float) == 7.0 and file.get("none", int) is None
    with pytest.raises(ModelLoadError, match="expected str"):
        file.get("small", str)
    with pytest.raises(ModelLoadError, match="expected int"):
        file.get("flag", int)
    assert file.tensors["b"].shape == (3, 2)
    assert file.raw(file.tensors["b"]).view("<f4").tolist() == [8, 9, 10, 11, 12, 13]
    file.close()
    file.close()


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return pair("k", ARRAY, struct.pack("<IQ", kind, count) + data)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "magic": (b"GGML" + bytes(60), "not a GGUF"),
    "short": (b"GGUF\3\0\0\0", "ends"),
    "version": (build([], [], version=1), "version 1"),
    "big-endian": (build([], [], version=3 << 24), "big-endian"),
    "tensor count": (build([], [], tensors=1 << 60), "claims"),
    "pair count": (build([], [], num_pairs=1 << 60), "claims"),
    "key twice": (build([pair("k", U32, u32(1))] * 2, []), "twice"),
    "value type": (build([pair("k", 99, b"")], [], bytes(64)), "unknown value type"),
    "string length": (build([pair("k", STRING, struct.pack("<Q", 1 << 62))], [], bytes(64)), "claims"),
    "string limit": (build([pair("k", STRING, string("x" * (MAX_STRING_BYTES + 1)))], []), "claims"),
    "not utf-8": (build([pair("k", STRING, string(b"\xff"))], []), "UTF-8"),
    "array count": (build([array(U32, 1 << 61)], [], bytes(64)), "claims"),
    "array of strings": (build([array(STRING, 1 << 20)], [], bytes(64)), "claims"),
    "array of arrays": (build([array(ARRAY, 1)], [], bytes(64)), "unsupported value type"),
    "alignment 0": (build([pair("general.alignment", U32, u32(0))], [], bytes(64)), "power of two"),
    "alignment 3": (build([pair("general.alignment", U32, u32(3))], [], bytes(64)), "power of two"),
    "alignment 2 MiB": (build([pair("general.alignment", U32, u32(1 << 21))], [], bytes(64)), "power of two"),
    "alignment text": (build([pair("general.alignment", STRING, string("32"))], [], bytes(64)), "power of two"),
    "no dims": (build([], [string("t") + struct.pack("<IIQ", 0, 0, 0)], bytes(64)), "0 dimensions"),
    "five dims": (build([], [tensor("t", [1] * 5, 0, 0)], bytes(64)), "5 dimensions"),
    "zero dim": (build([], [tensor("t", [4, 0], 0, 0)], bytes(64)), "dimensions"),
    "overflow": (build([], [tensor("t", [1 << 32, 1 << 32], 0, 0)], bytes(64)), "dimensions"),
    "type": (
        build([], [tensor("secret.weight", [4], 77, 0)], bytes(64)),
        "'secret.weight' has the unsupported type 77",
    ),
    "ragged row": (build([], [tensor("t", [33], 8, 0)], bytes(640)), "no multiple"),
    "past the end": (build([], [tensor("t", [64], 0, 0)], bytes(64)), "ends .* after the file|outside"),
    "offset": (build([], [tensor("t", [4], 0, 1 << 63)], bytes(64)), "outside"),
    "offset wraps": (build([], [tensor("t", [4], 0, (1 << 64) - 32)], bytes(64)), "outside"),
    "unaligned": (build([], [tensor("t", [4], 0, 4)], bytes(64)), "aligned"),
    "overlap": (build([], [tensor("a", [9], 0, 0), tensor("b", [4], 0, 32)], bytes(64)), "overlap"),
    "name twice": (build([], [tensor("a", [4], 0, 0), tensor("a", [4], 0, 32)], bytes(64)), "twice"),
    "name length": (build([], [tensor("n" * 5000, [4], 0, 0)], bytes(64)), "claims"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_their_name(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE[case]
    with pytest.raises(ModelLoadError, match=message) as info:
        read(tmp_path, content)
    assert "x.gguf" in str(info.value)


def small_model() -> bytes:
    """A whole, tiny model: every part of the loader has something to read."""
    arch: dict[str, Any] = {
        "context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32,
        "attention.head_count": 2, "attention.head_count_kv": 1,
    }  # fmt: skip
    pairs = [pair("general.architecture", STRING, string("llama")), pair("general.alignment", U32, u32(32))]
    pairs += [pair(f"llama.{key}", U32, u32(value)) for key, value in arch.items()]
    pairs.append(pair("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)))
    words = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
    pairs.append(pair("tokenizer.ggml.model", STRING, string("gpt2")))
    pairs.append(pair("tokenizer.ggml.pre", STRING, string("gpt-2")))
    tokens = struct.pack("<IQ", STRING, len(words)) + b"".join(map(string, words))
    pairs.append(pair("tokenizer.ggml.tokens", ARRAY, tokens))
    kinds = struct.pack("<IQ6i", I32, 6, 2, 3, 3, 1, 1, 1)
    pairs.append(pair("tokenizer.ggml.token_type", ARRAY, kinds))
    pairs.append(pair("tokenizer.ggml.merges", ARRAY, struct.pack("<IQ", STRING, 1) + string("a b")))
    pairs.append(pair("tokenizer.ggml.eos_token_id", U32, u32(2)))
    pairs.append(pair("tokenizer.chat_template", STRING, string("{{ messages }}")))
    shapes = {"token_embd.weight": ([32, 6], 8, 6 * 34), "blk.0.attn_q.weight": ([32, 32], 2, 32 * 18)}
    shapes |= {"blk.0.attn_norm.weight": ([32], 0, 128), "blk.0.ffn_up.weight": ([32, 32], 1, 2048)}
    tensors, offset = [], 0
    for name, (dims, kind, size) in shapes.items():
        tensors.append(tensor(name, dims, kind, offset))
        offset += -(-size // 32) * 32
    rng = np.random.default_rng(3)
    return build(pairs, tensors, rng.integers(0, 60, offset, dtype=np.uint8).tobytes())


def load_everything(path: Path) -> None:
    import torch

    with GGUFLoader().open(path) as checkpoint:
        checkpoint.tokenizer_spec()
        for _, weight in checkpoint.weights(torch.bfloat16):
            assert weight.numel() < 1 << 16


def mutate(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    header = len(data) - 3000
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(4, header)
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice([0, 1, 127, 128, 255])
            case 2:
                struct.pack_into("<Q", data, at, rng.choice([0, 1, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1]))
            case 3:
                struct.pack_into("<I", data, at, rng.choice([0, 9, 1 << 31, (1 << 32) - 1]))
            case 4:
                del data[at : at + rng.randrange(1, 40)]
            case 5:
                del data[rng.randrange(4, len(data)) :]
                break
        header = min(header, len(data) - 8)
        if header <= 4:
            break
    return bytes(data)


def survive(tmp_path: Path, count: int, seed: int) -> None:
    content = small_model()
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    load_everything(path)
    rng = random.Random(seed)
    refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        path.write_bytes(mutate(content, rng))
        try:
            load_everything(path)
        except ModelLoadError:
            refused += 1
    assert refused > count // 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_damaged_files_raise_load_errors_only(tmp_path: Path) -> None:
    survive(tmp_path, count=3000, seed=11)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_damaged_files(tmp_path: Path) -> None:
    survive(tmp_path, count=100_000, seed=12)
