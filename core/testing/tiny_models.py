"""Tiny random checkpoints in HuggingFace form, and a byte tokenizer: what tests load instead of a real model.

transformers, safetensors and tokenizers are imported inside the functions; only tests need them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320
_MERGES = "t h,h e,i n,a n,Ġ t,Ġt he,Ġ a,e r,o n,r e,in g,an d,Ġ and,o u,Ġ s,Ġ w"


@dataclass(frozen=True, slots=True)
class TinyModel:
    """model_type: as AutoConfig knows it. config: what differs from the common small sizes. drop: sizes that the
    family does not have. std, embed_std: spread of the random matrices and of the embedding, such
    that greedy choices vary."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    std: float = 0.12
    embed_std: float = 0.12


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": 32,
    "factor": 8.0,
    "rope_theta": 10000.0,
}
_GEMMA = {"head_dim": 16, "hidden_size": 48}

TINY_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("llama"),
    "llama-tied": TinyModel("llama", {"tie_word_embeddings": True}, std=0.2, embed_std=0.2),
    "llama-head-dim": TinyModel("llama", {"head_dim": 24}),
    "llama-mqa": TinyModel("llama", {"num_key_value_heads": 1}),
    "llama-bias": TinyModel("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-vocab": TinyModel("llama", {"vocab_size": 515}),
    "llama-linear": TinyModel(
        "llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    ),
    "llama-dynamic": TinyModel(
        "llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
    "llama-yarn": TinyModel("llama", {"rope_parameters": _YARN}),
    "llama-llama3": TinyModel("llama", {"rope_parameters": _LLAMA3}),
    "llama-longrope": TinyModel("llama", {"rope_parameters": _LONGROPE}),
    "mistral": TinyModel("mistral", {"sliding_window": 8}),
    "mistral-full": TinyModel("mistral", {"sliding_window": None}),
    "qwen2": TinyModel("qwen2"),
    "qwen2-window": TinyModel("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": TinyModel("qwen3", {"head_dim": 16}),
    "phi3": TinyModel("phi3", {"pad_token_id": 0, "sliding_window": 12, "original_max_position_embeddings": 256}),
    "phi3-partial-longrope": TinyModel(
        "phi3",
        {
            "hidden_size": 64,
            "pad_token_id": 0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "rope_parameters": {**_LONGROPE, "factor": None, "rope_type": "longrope"},
        },
    ),
    "gemma": TinyModel("gemma", _GEMMA, std=0.4, embed_std=0.4),
    "gemma2": TinyModel(
        "gemma2", {**_GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 20}, std=0.3, embed_std=0.03
    ),
    "gemma3": TinyModel(
        "gemma3_text",
        {**_GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2},
        std=0.3,
        embed_std=0.03,
    ),
    "olmo2": TinyModel("olmo2"),
    "smollm3": TinyModel("smollm3", {"no_rope_layer_interval": 2, "pad_token_id": 0}),
    "granite": TinyModel(
        "granite",
        {"embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
    ),
    # Families without a native form here: for the transformers fallback, some to be served and some to be refused.
    "gpt-neox": TinyModel("gpt_neox", {"rotary_pct": 0.5}, drop=("num_key_value_heads",)),
    "starcoder2": TinyModel("starcoder2", {"sliding_window": 8}),
    "stablelm": TinyModel("stablelm", {"partial_rotary_factor": 0.5}),
    "cohere": TinyModel("cohere", {"logit_scale": 0.25}),
    "opt": TinyModel(
        "opt", {"ffn_dim": 80, "word_embed_proj_dim": 48}, drop=("intermediate_size", "num_key_value_heads")
    ),
    "gpt2": TinyModel(
        "gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}, drop=tuple(set(_SIZES) - {"vocab_size"})
    ),
    "bloom": TinyModel(
        "bloom", {"hidden_size": 48, "n_layer": 3, "n_head": 4}, drop=tuple(set(_SIZES) - {"vocab_size"})
    ),
    "falcon": TinyModel(
        "falcon", {"alibi": True, "new_decoder_architecture": False}, drop=("intermediate_size", "num_key_value_heads")
    ),
    "mamba": TinyModel(
        "mamba", {"hidden_size": 48, "state_size": 8}, drop=tuple(set(_SIZES) - {"vocab_size", "num_hidden_layers"})
    ),
    "mixtral": TinyModel("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "exaone4": TinyModel("exaone4", {"sliding_window": 8}),
    "deepseek-v3": TinyModel(
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "num_key_value_heads": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
        },
    ),
    "falcon-h1": TinyModel(
        "falcon_h1",
        {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_chunk_size": 8},
    ),
    "gpt-oss": TinyModel(
        "gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 8}
    ),
    "llama4": TinyModel(
        "llama4_text",
        {"attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 80, "head_dim": 12},
    ),
    "lfm2": TinyModel("lfm2", {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3}),
    "t5": TinyModel(
        "t5",
        {"d_model": 48, "num_layers": 2, "num_heads": 4, "d_kv": 12, "d_ff": 80},
        drop=tuple(set(_SIZES) - {"vocab_size"}),
    ),
}


def make_tiny_model(
    folder: str | Path, name: str = "llama", *, seed: int = 0, tokenizer: bool = True, **overrides: Any
) -> Path:
    """Writes the checkpoint `name` of TINY_MODELS into `folder` (float32, one safetensors file) and returns the folder.

    `overrides` replace config fields. Every tensor is random, norms and biases too, so that none can be left out
    unseen.
    """
    import torch
    import transformers

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tiny = TINY_MODELS[name]
    sizes = {key: value for key, value in _SIZES.items() if key not in tiny.drop}
    special = {"bos_token_id": 0, "eos_token_id": 3}
    settings = {**sizes, **special, **tiny.config, **overrides}
    config = transformers.AutoConfig.for_model(tiny.model_type, **settings)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    _randomize(model, tiny, seed)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    transformers.logging.enable_progress_bar()
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [1, 3]}))
    if tokenizer:
        save_byte_tokenizer(folder)
    return folder


def _randomize(model: Any, tiny: TinyModel, seed: int) -> None:
    """Normal numbers everywhere; norms near 1, or near 0 where the family adds the 1 itself."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    one_plus = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.copy_(0.2 * noise + (0.0 if one_plus else 1.0))
            else:
                std = tiny.embed_std if "embed" in name else tiny.std
                parameter.copy_(noise * (0.1 if parameter.ndim == 1 else std))


def save_byte_tokenizer(folder: str | Path, vocab_size: int | None = None) -> Path:
    """Writes tokenizer.json and tokenizer_config.json: special tokens first, then 256 bytes, then a few merges.

    Ids: `<s>` 0, `</s>` 1, `<|im_start|>` 2, `<|im_end|>` 3 (end of a turn), bytes from 4, merges from 260.
    `vocab_size` is only checked: a model's must not be smaller than the tokenizer's.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = Path(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES.split(","))]
    words = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    if vocab_size is not None and vocab_size < len(words):
        raise ValueError(f"the byte tokenizer has {len(words)} tokens; a vocabulary of {vocab_size} is too small")
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return folder
