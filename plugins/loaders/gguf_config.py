"""GGUF metadata and tensor names in HuggingFace's terms, per architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hotswap.core.contracts.loader import ModelLoadError

from .gguf_container import GGUFFile
from .gguf_rope import rope_parameters

Permuted = Literal["q", "k"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture reads in HuggingFace's terms.

    permuted: llama.cpp stores the rows of q and k with each rotary pair side by side; undone on load.
    norm_offset: subtracted from every norm weight (gemma's files hold 1 + w).
    block: names inside a layer that differ from the common ones. extra: adds to the config what the common part lacks.
    """

    hf_class: str
    model_type: str
    permuted: bool = False
    norm_offset: float = 0.0
    block: Mapping[str, str] = field(default_factory=dict)
    extra: Callable[[GGUFFile, dict[str, Any]], None] = lambda file, config: None


@dataclass(frozen=True, slots=True)
class TensorRole:
    """Where a stored tensor goes: its HuggingFace name and what has to be undone."""

    name: str
    permuted: Permuted | None = None
    offset: float = 0.0


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NOT_WEIGHTS = re.compile(r"(?:blk\.\d+\.)?rope_(?:freqs|factors_long|factors_short)\.weight")
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias)")
_TOP_NAME = re.compile(r"([a-z0-9_]+)\.(weight|bias)")


def architecture_of(file: GGUFFile) -> tuple[str, Architecture]:
    """The file's architecture. Raises ModelLoadError for one that cannot be read."""
    name = file.get("general.architecture", str)
    if name is None:
        raise ModelLoadError(f"{file.path}: general.architecture is missing")
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: the GGUF architecture {name!r} is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}"
        )
    if file.get(f"{name}.expert_count", int):
        raise ModelLoadError(
            f"{file.path}: mixture-of-experts models cannot be read from GGUF; use the safetensors checkpoint"
        )
    return name, ARCHITECTURES[name]


def tensor_role(name: str, architecture: Architecture) -> TensorRole | None:
    """The role of a stored tensor, or None when it is not a weight. A name that is not known keeps its own spelling."""
    if _NOT_WEIGHTS.fullmatch(name):
        return None
    if match := _BLOCK_NAME.fullmatch(name):
        layer, part, suffix = match.groups()
        target = architecture.block.get(part) or _BLOCK.get(part)
        if target is None:
            return TensorRole(name)
        permuted: Permuted | None = None
        if architecture.permuted and part in ("attn_q", "attn_k"):
            permuted = "q" if part == "attn_q" else "k"
        offset = architecture.norm_offset if part.endswith("norm") else 0.0
        return TensorRole(f"model.layers.{layer}.{target}.{suffix}", permuted, offset)
    if (match := _TOP_NAME.fullmatch(name)) and match[1] in _TOP:
        offset = architecture.norm_offset if match[1] == "output_norm" else 0.0
        return TensorRole(f"{_TOP[match[1]]}.{match[2]}", None, offset)
    return TensorRole(name)


class _Fields:
    """Typed access to one architecture's keys."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def integer(self, key: str) -> int | None:
        """A per-layer array is taken when all its entries agree."""
        full = f"{self.architecture}.{key}"
        value = self.file.metadata.get(full)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            return int(value[0])
        if isinstance(value, np.ndarray | list):
            raise ModelLoadError(f"{self.file.path}: {full} differs from layer to layer, which is not supported")
        return self.file.get(full, int)

    def needed(self, key: str) -> int:
        value = self.integer(key)
        if value is None or not 0 < value < 1 << 31:
            state = "is missing" if value is None else f"is {value}"
            raise ModelLoadError(f"{self.file.path}: {self.architecture}.{key} {state}")
        return value

    def real(self, key: str) -> float | None:
        return self.file.get(f"{self.architecture}.{key}", float)


def config_of(file: GGUFFile) -> dict[str, Any]:
    """config.json as HuggingFace would have it. Raises ModelLoadError for missing or impossible values."""
    name, architecture = architecture_of(file)
    fields = _Fields(file, name)
    heads, hidden = fields.needed("attention.head_count"), fields.needed("embedding_length")
    head_dim = fields.integer("attention.key_length") or hidden // heads
    epsilon = fields.real("attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise ModelLoadError(f"{file.path}: {name}.attention.layer_norm_rms_epsilon is missing")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path}: the tensor token_embd.weight is missing")
    config: dict[str, Any] = {
        "architectures": [architecture.hf_class],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.needed("feed_forward_length"),
        "num_hidden_layers": fields.needed("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.needed("context_length"),
        "rms_norm_eps": _short(epsilon),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "torch_dtype": "bfloat16",
    }
    config.update(rope_parameters(file, name, head_dim, config["max_position_embeddings"]))
    for key in ("bos", "eos"):
        if (value := file.get(f"tokenizer.ggml.{key}_token_id", int)) is not None:
            config[f"{key}_token_id"] = value
    if (pad := file.get("tokenizer.ggml.padding_token_id", int)) is not None:
        config["pad_token_id"] = pad
    architecture.extra(file, config)
    return config


def generation_config_of(file: GGUFFile) -> dict[str, Any]:
    """What the file recommends for sampling, in generation_config.json's names."""
    names = {"temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
    found: dict[str, Any] = {}
    for key, target in names.items():
        if (value := file.get(f"general.sampling.{key}", float)) is not None:
            found[target] = _short(value)
    if (top_k := file.get("general.sampling.top_k", int)) is not None:
        found["top_k"] = top_k
    return found


def eos_ids_of(file: GGUFFile) -> tuple[int, ...]:
    """End of sequence, of turn and of message: any of them ends generation."""
    keys = ("eos", "eot", "eom")
    values = (file.get(f"tokenizer.ggml.{key}_token_id", int) for key in keys)
    return tuple(sorted({value for value in values if value is not None and 0 <= value < 0xFFFFFFFF}))


def _short(value: float) -> float:
    """The decimal number that was meant: the shortest that gives the same float32."""
    return float(str(np.float32(value)))


def _sliding_window(file: GGUFFile, config: dict[str, Any], name: str) -> None:
    window = file.get(f"{name}.attention.sliding_window", int)
    config["sliding_window"] = window or None


def _llama(file: GGUFFile, config: dict[str, Any]) -> None:
    if file.get("llama.attention.sliding_window", int):
        config.update(architectures=["MistralForCausalLM"], model_type="mistral")
        _sliding_window(file, config, "llama")


def _qwen(file: GGUFFile, config: dict[str, Any]) -> None:
    config["use_sliding_window"] = False


def _gemma(file: GGUFFile, config: dict[str, Any]) -> None:
    config.update(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh")


def _gemma2(file: GGUFFile, config: dict[str, Any]) -> None:
    _gemma(file, config)
    _sliding_window(file, config, "gemma2")
    config["attn_logit_softcapping"] = file.get("gemma2.attn_logit_softcapping", float) or 50.0
    config["final_logit_softcapping"] = file.get("gemma2.final_logit_softcapping", float) or 30.0
    config["query_pre_attn_scalar"] = _gemma_scalar(config, wide_layers=46)


def _gemma3(file: GGUFFile, config: dict[str, Any]) -> None:
    _gemma(file, config)
    _sliding_window(file, config, "gemma3")
    config["query_pre_attn_scalar"] = _gemma_scalar(config, wide_layers=62)
    config["rope_local_base_freq"] = 10000.0
    pattern = file.get("gemma3.attention.sliding_window_pattern", int) or 6
    config["sliding_window_pattern"] = pattern
    layers = range(1, config["num_hidden_layers"] + 1)
    config["layer_types"] = ["sliding_attention" if layer % pattern else "full_attention" for layer in layers]


def _gemma_scalar(config: Mapping[str, Any], wide_layers: int) -> int:
    """The 27B models, known by their depth, scale attention by hidden / heads; the others by the head's size."""
    if config["num_hidden_layers"] == wide_layers:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _phi3(file: GGUFFile, config: dict[str, Any]) -> None:
    _sliding_window(file, config, "phi3")
    rotary = file.get("phi3.rope.dimension_count", int) or config["head_dim"]
    config["partial_rotary_factor"] = rotary / config["head_dim"]
    if (original := file.get("phi3.rope.scaling.original_context_length", int)) is not None:
        config["original_max_position_embeddings"] = original


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", permuted=True, extra=_llama),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", extra=_qwen),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", extra=_qwen),
    "gemma": Architecture("GemmaForCausalLM", "gemma", norm_offset=1.0, extra=_gemma),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", norm_offset=1.0, block=_GEMMA_NORMS, extra=_gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", norm_offset=1.0, block=_GEMMA_NORMS, extra=_gemma3),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", block={"ffn_up": "mlp.gate_up_proj"}, extra=_phi3),
}
