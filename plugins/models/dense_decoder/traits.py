"""What tells the dense families apart, as data. Read from the modelling code of transformers 5, which is the test
oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Traits:
    """One architecture. Fields named `default_*` hold what an absent config field means.

    norm_order: where a layer's norms stand. "pre": before attention and MLP. "sandwich": before and after each.
    "post": after each. qkv_bias, output_bias, mlp_bias: True or False, or the name of the config field that says so.
    qk_norm: norm of queries and keys: none, over each head, or over all heads of a token. norm_wide, norm_one_plus:
    see core.layers.norm.RMSNorm. windows: which layers see a sliding window. "never"; "all": every layer, if
    `sliding_window` is set; "layer_types": as that
        list says, under the rule of `default_layer_types` when it is absent.
    honours: config fields, out of GUARDED, that this architecture gives a meaning.
    fused_checkpoint: the checkpoint stores qkv and gate_up fused.
    """

    norm_order: Literal["pre", "sandwich", "post"] = "pre"
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: Literal["none", "head", "all"] = "none"
    norm_wide: bool = False
    norm_one_plus: bool = False
    activation_field: str = "hidden_act"
    default_activation: str = "silu"
    activation_aliases: tuple[tuple[str, str], ...] = ()
    embed_scale: Literal["none", "sqrt_hidden", "embedding_multiplier"] = "none"
    attention_scale: Literal["head_dim", "query_pre_attn_scalar", "attention_multiplier"] = "head_dim"
    windows: Literal["never", "all", "layer_types"] = "never"
    default_layer_types: Literal["full", "max_window_layers", "every_other", "pattern", "no_rope"] = "full"
    needs_use_sliding_window: bool = False
    rope_per_layer_type: bool = False
    no_rope_layers: bool = False
    fused_checkpoint: bool = False
    default_tied: bool = False
    default_head_dim: int | None = None
    default_kv_heads: int | None = None
    default_window: int | None = None
    default_eps: float = 1e-6
    default_theta: float = 10000.0
    default_max_position: int = 2048
    default_original_max_position: int | None = None
    default_query_pre_attn_scalar: float = 256.0
    default_attention_soft_cap: float | None = None
    default_logit_soft_cap: float | None = None
    honours: frozenset[str] = frozenset()


# Config fields that change what is computed, with the values that change nothing. A field that the architecture does
# not honour must hold one of these (or be absent); otherwise the model is refused, naming the field. None means that
# only null is neutral.
GUARDED: dict[str, tuple[object, ...]] = {
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (1.0,),
    "attn_logit_softcapping": (),
    "attn_temperature_tuning": (False, 0),
    "clip_qkv": (),
    "dual_chunk_attention_config": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "lm_head_bias": (False,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "mlp_bias": (False,),
    "no_rope_layers": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "parallel_residual": (False,),
    "partial_rotary_factor": (1.0,),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "sliding_window": (),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}

_LLAMA = Traits(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    honours=frozenset({"attention_bias", "mlp_bias"}),
)
_QWEN = Traits(
    windows="layer_types",
    default_layer_types="max_window_layers",
    needs_use_sliding_window=True,
    default_window=4096,
    default_kv_heads=32,
    default_max_position=32768,
    honours=frozenset({"sliding_window", "use_sliding_window"}),
)
_GEMMA = Traits(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    norm_wide=True,
    norm_one_plus=True,
    default_activation="gelu_pytorch_tanh",
    activation_aliases=(("gelu", "gelu_pytorch_tanh"),),  # the first release said "gelu" and meant the tanh form
    embed_scale="sqrt_hidden",
    default_tied=True,
    default_head_dim=256,
    default_kv_heads=16,
    default_max_position=8192,
    honours=frozenset({"attention_bias"}),
)
_GEMMA2 = replace(
    _GEMMA,
    norm_order="sandwich",
    activation_field="hidden_activation",
    activation_aliases=(),
    attention_scale="query_pre_attn_scalar",
    windows="layer_types",
    default_layer_types="every_other",
    default_window=4096,
    default_kv_heads=4,
    default_attention_soft_cap=50.0,
    default_logit_soft_cap=30.0,
    honours=_GEMMA.honours
    | {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "sliding_window"},
)

TRAITS: dict[str, Traits] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": Traits(
        windows="all",
        default_window=4096,
        default_kv_heads=8,
        default_max_position=131072,
        honours=frozenset({"sliding_window"}),
    ),
    # Qwen2 always has these biases; some configs say so with `attention_bias`, which is then checked in config.py.
    "Qwen2ForCausalLM": replace(_QWEN, qkv_bias=True),
    "Qwen3ForCausalLM": replace(
        _QWEN,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
        default_head_dim=128,
        honours=_QWEN.honours | {"attention_bias"},
    ),
    "Phi3ForCausalLM": Traits(
        windows="all",
        fused_checkpoint=True,
        default_eps=1e-5,
        default_max_position=4096,
        default_original_max_position=4096,
        honours=frozenset({"sliding_window", "partial_rotary_factor"}),
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        qk_norm="head",
        default_layer_types="pattern",
        rope_per_layer_type=True,
        default_theta=1_000_000.0,
        default_max_position=131072,
        default_attention_soft_cap=None,
        default_logit_soft_cap=None,
        honours=_GEMMA2.honours - {"attn_logit_softcapping"},
    ),
    "Olmo2ForCausalLM": Traits(
        norm_order="post",
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="all",
        norm_wide=True,
        default_eps=1e-5,
        honours=frozenset({"attention_bias"}),
    ),
    "SmolLM3ForCausalLM": replace(
        _LLAMA,
        windows="layer_types",
        default_layer_types="no_rope",
        needs_use_sliding_window=True,
        no_rope_layers=True,
        default_tied=True,
        default_kv_heads=4,
        default_theta=2_000_000.0,
        default_max_position=32768,
        honours=_LLAMA.honours | {"sliding_window", "use_sliding_window", "no_rope_layers"},
    ),
    "GraniteForCausalLM": replace(
        _LLAMA,
        embed_scale="embedding_multiplier",
        attention_scale="attention_multiplier",
        honours=_LLAMA.honours
        | {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"},
    ),
}
