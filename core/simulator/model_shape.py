"""The sizes of a dense decoder that a step's time and the KV cache follow from, out of its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import UsageError
from ..model_window import model_window

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_SHAPE: Final = "llama-3.1-8b"
DEFAULT_WINDOW: Final = 8192  # as the engine's, for a config that names none
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")

# Sizes as in the models' own config.json on the hub: meta-llama/Llama-3.1-8B, HuggingFaceTB/SmolLM2-135M.
KNOWN_SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    DEFAULT_SHAPE: {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """layer_parameters: of all layers' products (norms are too small to count). head_parameters: of the output head; an
    embedding that is not tied to it is as large again. dtype: of weights and KV cache. config: what it was read
    from."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_parameters: int
    head_parameters: int
    tied: bool
    dtype: str
    window: int
    config: Mapping[str, Any]

    @property
    def weight_bytes(self) -> int:
        """In memory."""
        return self._bytes(self.layer_parameters + self.head_parameters * (1 if self.tied else 2))

    @property
    def read_bytes(self) -> int:
        """Of weights that a step reads: all but the embedding, of which it reads single rows."""
        return self._bytes(self.layer_parameters + self.head_parameters)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._bytes(2 * self.layers * self.kv_heads * self.head_dim)

    @property
    def attention_width(self) -> int:
        """Query values of a token, over all heads and layers."""
        return self.layers * self.heads * self.head_dim

    def _bytes(self, numbers: int) -> int:
        return numbers * DTYPE_BYTES[self.dtype]


def read_shape(text: str, dtype: str = "auto") -> ModelShape:
    """A config.json, a folder that has one, or a name of KNOWN_SHAPES. Raises UsageError."""
    path = Path(text).expanduser()
    if text.lower() in KNOWN_SHAPES and not path.exists():
        return shape_of(text.lower(), KNOWN_SHAPES[text.lower()], dtype)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--model {text}: {path}: {error.strerror}; give a config.json, a folder with one, or one of "
            f"{', '.join(KNOWN_SHAPES)}"
        ) from None
    except ValueError as error:
        raise UsageError(f"--model {text}: {path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise UsageError(f"--model {text}: {path}: an object is needed")
    return shape_of(text, config, dtype)


def shape_of(name: str, config: Mapping[str, Any], dtype: str = "auto") -> ModelShape:
    """dtype: "auto" is the config's own. Raises UsageError naming the field."""
    whole = config
    if isinstance(text := config.get("text_config"), Mapping):
        config = {**config, **text}
    experts = next((key for key in _EXPERTS if config.get(key)), None)
    if experts is not None:
        raise UsageError(
            f"--model {name}: {experts}: the time of a mixture of experts does not follow from its config; measure it, and "
            "give --cost FILE with the config of a dense model whose KV cache has the same size"
        )
    hidden, heads = _number(name, config, "hidden_size"), _number(name, config, "num_attention_heads")
    layers, kv_heads = _number(name, config, "num_hidden_layers"), int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype == "auto":
        dtype = stored if stored in DTYPE_BYTES else "bfloat16"
    return ModelShape(
        name=name,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layer_parameters=layers * (attention + 3 * hidden * _number(name, config, "intermediate_size")),
        head_parameters=_number(name, config, "vocab_size") * hidden,
        tied=bool(config.get("tie_word_embeddings")),
        dtype=dtype,
        window=model_window(config) or DEFAULT_WINDOW,
        config=whole,
    )


def _number(name: str, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"--model {name}: its config has no {key} (a whole number from 1 on)")
    return value
