"""The built-in loaders, and the example of the docs, pass the conformance suite."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hotswap.core.testing.suites import LoaderSuite
from hotswap.core.testing.suites.loader import sample_tensors

PROVIDERS = "hotswap.plugins.loaders.providers"


class TestSafetensors(LoaderSuite):
    plugin = PROVIDERS
    name = "safetensors"


class TestSafetensorsInShards(LoaderSuite):
    plugin = PROVIDERS
    name = "safetensors"
    fuzz_cases = 60

    def make_checkpoint(self, folder: Path) -> tuple[Path, Mapping[str, Tensor] | None]:
        from safetensors.torch import save_file

        tensors = sample_tensors()
        weight_map: dict[str, str] = {}
        for number, names in enumerate((sorted(tensors)[:4], sorted(tensors)[4:]), start=1):
            file = f"model-{number:05}-of-00002.safetensors"
            save_file({name: tensors[name] for name in names}, folder / file)
            weight_map.update(dict.fromkeys(names, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        return folder, tensors


class TestGguf(LoaderSuite):
    """One file of float32, float16 and 8-bit tensors, written by the format's own package."""

    plugin = PROVIDERS
    name = "gguf"

    def make_checkpoint(self, folder: Path) -> tuple[Path, Mapping[str, Tensor] | None]:
        gguf: Any = pytest.importorskip("gguf")
        path = folder / "tiny.gguf"
        writer = gguf.GGUFWriter(str(path), "llama")
        numbers = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}
        for key, value in {**numbers, "attention.head_count": 2, "attention.head_count_kv": 2}.items():
            writer.add_uint32(f"llama.{key}", value)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        rng = np.random.default_rng(0)
        plain = {name: rng.standard_normal((6, 32)).astype(np.float32) for name in ("token_embd", "output")}
        writer.add_tensor("token_embd.weight", plain["token_embd"])
        writer.add_tensor("output.weight", plain["output"].astype(np.float16))
        up = rng.standard_normal((32, 32)).astype(np.float32)
        packed = gguf.quants.quantize(up, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("blk.0.ffn_up.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unpacked = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        return path, {
            "model.embed_tokens.weight": torch.from_numpy(plain["token_embd"]),
            "lm_head.weight": torch.from_numpy(plain["output"].astype(np.float16)),
            "model.layers.0.mlp.up_proj.weight": torch.from_numpy(unpacked).bfloat16(),
        }

    tolerance = 2**-8  # quantized tensors are rounded to what is asked for


class TestDummy(LoaderSuite):
    plugin = PROVIDERS
    name = "dummy"

    def make_checkpoint(self, folder: Path) -> tuple[Path, Mapping[str, Tensor] | None]:
        path, _ = super().make_checkpoint(folder)
        (path / "model.safetensors").unlink()
        return path, None


class TestDummyAsItIs(LoaderSuite):
    """As `plugins check loader=dummy` runs it: over weights that it does not read."""

    plugin = PROVIDERS
    name = "dummy"
    fuzz_cases = 20


class TestExample(LoaderSuite):
    plugin = "hotswap.core.testing.templates.loader"
