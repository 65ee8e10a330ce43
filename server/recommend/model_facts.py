"""What a model takes of a device's memory and time, out of its config and the size of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotswap.core.errors import UsageError

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """weight_bytes: in memory, as served. dtype: of weights and KV cache. window: the most tokens a request may have; 0 when
    the config does not say. weights_from: how weight_bytes was found, for the reader."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    weight_bytes: int
    window: int
    weights_from: str

    @property
    def dtype_bytes(self) -> int:
        return _BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        return self.weight_bytes // self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class StoredModel:
    """config: the content of config.json. total_bytes: of the tensors as they are stored."""

    config: Mapping[str, Any]
    total_bytes: int


def from_index(folder: Path) -> StoredModel | None:
    """A folder with config.json and the index of a sharded checkpoint: the weights themselves need not be there. None for
    anything else."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return StoredModel(config, int(index["metadata"]["total_size"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # whoever loads it says what is wrong with it


def facts_of(name: str, checkpoint: StoredModel, loader: str, *, dtype: str = "auto", on_cpu: bool) -> ModelFacts:
    """Raises UsageError naming what the config does not say."""
    config = checkpoint.config
    if isinstance(text := config.get("text_config"), Mapping):
        config = {**config, **text}
    heads = _number(name, config, "num_attention_heads")
    hidden = _number(name, config, "hidden_size")
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    served = _served_dtype(stored, loader, dtype, on_cpu)
    layers = _number(name, config, "num_hidden_layers")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    if loader == "gguf":
        parameters = _dense_parameters(name, config, layers, heads, kv_heads, head_dim)
        weight_bytes, source = parameters * _BYTES[served], f"{parameters:,} parameters by its config, dequantized"
    else:
        weight_bytes = checkpoint.total_bytes * _BYTES[served] // _BYTES.get(stored, _BYTES[served])
        source = f"{checkpoint.total_bytes:,} bytes in the checkpoint, {stored}"
    return ModelFacts(
        name=name,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=served,
        weight_bytes=weight_bytes,
        window=int(config.get("max_position_embeddings") or 0),
        weights_from=source,
    )


def _served_dtype(stored: str, loader: str, asked: str, on_cpu: bool) -> str:
    """As `--dtype auto` decides it (docs/operators/models.md, Data types)."""
    if asked != "auto":
        return asked
    if loader == "gguf":
        return "bfloat16"
    if stored == "float16" and on_cpu:
        return "float32"
    return stored if stored in ("float32", "bfloat16", "float16") else "bfloat16"


def _dense_parameters(
    name: str, config: Mapping[str, Any], layers: int, heads: int, kv_heads: int, head_dim: int
) -> int:
    """Embedding, attention and gated MLP of a dense decoder; norms are too small to count."""
    hidden = _number(name, config, "hidden_size")
    embedding = _number(name, config, "vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    return embedding + layers * (attention + 3 * hidden * _number(name, config, "intermediate_size"))


def _number(name: str, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}: its config has no {key}, so its memory cannot be worked out")
    return value
