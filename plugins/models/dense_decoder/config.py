"""From a config.json to everything that the decoder needs to know, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotswap.core.contracts.loader import ModelLoadError
from hotswap.core.layers.activation import check_activation
from hotswap.core.layers.rotary import RopeConfig, rope_config

from .traits import GUARDED, TRAITS, Traits

_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """One model. windows: per layer, the tokens that a query sees (itself included), or None for all. ropes: per
    layer, the rotation, or None for a layer without positions. round_embed_scale: the scale is rounded to the model's
    dtype first. A soft cap c maps x to c * tanh(x / c)."""

    traits: Traits
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    activation: str
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    max_position: int
    windows: tuple[int | None, ...]
    ropes: tuple[RopeConfig | None, ...]
    attention_scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    embed_scale: float
    round_embed_scale: bool
    residual_scale: float
    logits_divisor: float


def text_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The part that describes the language model. A nested `text_config` decides; the outer level fills what it
    leaves out."""
    nested = hf_config.get("text_config")
    if not isinstance(nested, Mapping):
        return dict(hf_config)
    outer = {
        name: value for name, value in hf_config.items() if name not in ("text_config", "vision_config", "audio_config")
    }
    return {**outer, **nested}


def dense_config(hf_config: Mapping[str, Any]) -> DenseConfig:
    """Raises ModelLoadError naming every field that is missing or cannot be honoured."""
    architecture = next((name for name in hf_config.get("architectures") or () if name in TRAITS), None)
    if architecture is None:
        raise ModelLoadError(
            f"config.json: architectures {hf_config.get('architectures')} are not served by dense_decoder"
        )
    traits = TRAITS[architecture]
    config = text_config(hf_config)
    _check_fields(config, traits, architecture)
    num_layers, num_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    num_kv_heads = int(_kv_heads(config, traits, num_heads))
    head_dim = _head_dim(config, traits, num_heads)
    layer_types = _layer_types(config, traits, num_layers)
    activation = _value(config, traits.activation_field, traits.default_activation)
    activation = dict(traits.activation_aliases).get(activation, activation)
    check_activation(activation, traits.activation_field)
    return DenseConfig(
        traits=traits,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=float(_value(config, "rms_norm_eps", traits.default_eps)),
        activation=activation,
        qkv_bias=_flag(config, traits.qkv_bias),
        output_bias=_flag(config, traits.output_bias),
        mlp_bias=_flag(config, traits.mlp_bias),
        tied=bool(_value(config, "tie_word_embeddings", traits.default_tied)),
        max_position=int(_value(config, "max_position_embeddings", traits.default_max_position)),
        windows=_windows(config, traits, layer_types),
        ropes=_ropes(config, traits, head_dim, layer_types),
        attention_scale=_attention_scale(config, traits, head_dim),
        attention_soft_cap=_soft_cap(config, "attn_logit_softcapping", traits, traits.default_attention_soft_cap),
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping", traits, traits.default_logit_soft_cap),
        embed_scale=_embed_scale(config, traits),
        round_embed_scale=traits.embed_scale == "sqrt_hidden",
        residual_scale=float(_value(config, "residual_multiplier", 1.0)),
        logits_divisor=float(_value(config, "logits_scaling", 1.0)),
    )


def _value(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """A config field; `default` when it is absent or null."""
    value = config.get(name)
    return default if value is None else value


def _flag(config: Mapping[str, Any], trait: bool | str) -> bool:
    return bool(config.get(trait)) if isinstance(trait, str) else trait


def _check_fields(config: Mapping[str, Any], traits: Traits, architecture: str) -> None:
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    problems = [f"{name} is missing" for name in required if config.get(name) is None]
    for name, neutral in GUARDED.items():
        value = config.get(name)
        if value is None or name in traits.honours or value in neutral:
            continue
        if name == "attention_bias" and traits.qkv_bias is True:
            continue  # Qwen2 always has biases on q, k and v: the field says nothing new
        problems.append(f"{name}={value!r} has no meaning for {architecture} here, and may not be ignored")
    if problems:
        raise ModelLoadError(f"config.json of {architecture}: {'; '.join(problems)}")


def _kv_heads(config: Mapping[str, Any], traits: Traits, num_heads: int) -> int:
    if "num_key_value_heads" in config:
        heads = int(_value(config, "num_key_value_heads", num_heads))
    else:
        heads = num_heads if traits.default_kv_heads is None else traits.default_kv_heads
    if heads <= 0 or num_heads % heads:
        raise ModelLoadError(
            f"config.json: num_attention_heads={num_heads} is no multiple of num_key_value_heads={heads}"
        )
    return heads


def _head_dim(config: Mapping[str, Any], traits: Traits, num_heads: int) -> int:
    default = traits.default_head_dim if "head_dim" not in config else None
    head_dim = _value(config, "head_dim", default)
    if head_dim is not None:
        return int(head_dim)
    hidden_size = int(config["hidden_size"])
    if hidden_size % num_heads:
        raise ModelLoadError(
            f"config.json: hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}: give head_dim"
        )
    return hidden_size // num_heads


def _no_rope(config: Mapping[str, Any], traits: Traits, num_layers: int) -> list[bool]:
    """Per layer, whether it has no rotation."""
    if not traits.no_rope_layers:
        return [False] * num_layers
    listed = config.get("no_rope_layers")
    if listed:
        if len(listed) < num_layers:
            raise ModelLoadError(f"config.json: no_rope_layers has {len(listed)} entries for {num_layers} layers")
        return [not rotated for rotated in listed[:num_layers]]
    interval = int(_value(config, "no_rope_layer_interval", 4))
    return [(index + 1) % interval == 0 for index in range(num_layers)]


def _layer_types(config: Mapping[str, Any], traits: Traits, num_layers: int) -> list[str]:
    listed = config.get("layer_types")
    if listed is not None:
        unknown = sorted(set(listed) - set(_LAYER_TYPES))
        if unknown or len(listed) < num_layers:
            raise ModelLoadError(
                f"config.json: layer_types must be one of {_LAYER_TYPES} for each of {num_layers} layers, not {listed}"
            )
        listed = list(listed[:num_layers])
        if traits.windows != "layer_types" and len(set(listed)) > 1:
            raise ModelLoadError(
                f"config.json: layer_types mixes {sorted(set(listed))}, which this architecture does not do"
            )
        return listed
    return [_LAYER_TYPES[int(_slides_by_default(config, traits, index, num_layers))] for index in range(num_layers)]


def _slides_by_default(config: Mapping[str, Any], traits: Traits, index: int, num_layers: int) -> bool:
    match traits.default_layer_types:
        case "max_window_layers":
            return index >= int(_value(config, "max_window_layers", 28))
        case "every_other":
            return index % 2 == 0
        case "pattern":
            return bool((index + 1) % int(_value(config, "sliding_window_pattern", 6)))
        case "no_rope":
            return _no_rope(config, traits, num_layers)[index]
        case "full":
            return False


def _windows(config: Mapping[str, Any], traits: Traits, layer_types: list[str]) -> tuple[int | None, ...]:
    window = config.get("sliding_window", traits.default_window)
    if (
        traits.windows == "never"
        or window is None
        or (traits.needs_use_sliding_window and not config.get("use_sliding_window"))
    ):
        return (None,) * len(layer_types)
    if int(window) <= 0:
        raise ModelLoadError(f"config.json: sliding_window={window} must be positive")
    if traits.windows == "all":
        return (int(window),) * len(layer_types)
    return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)


def _ropes(
    config: Mapping[str, Any], traits: Traits, head_dim: int, layer_types: list[str]
) -> tuple[RopeConfig | None, ...]:
    of_type = {kind: _rope_of_type(config, traits, head_dim, kind) for kind in dict.fromkeys(layer_types)}
    if any(rope.rotary_dim != head_dim for rope in of_type.values()) and "partial_rotary_factor" not in traits.honours:
        raise ModelLoadError(
            "config.json: partial_rotary_factor has no meaning for this architecture, and may not be ignored"
        )
    without = _no_rope(config, traits, len(layer_types))
    return tuple(None if bare else of_type[kind] for kind, bare in zip(layer_types, without, strict=True))


def _rope_of_type(config: Mapping[str, Any], traits: Traits, head_dim: int, layer_type: str) -> RopeConfig:
    theta = traits.default_theta
    if traits.rope_per_layer_type:
        config, theta = _gemma3_rope(config, traits, layer_type)
    return rope_config(
        config,
        head_dim,
        layer_type=layer_type if traits.rope_per_layer_type else None,
        default_theta=theta,
        default_original_max_position=traits.default_original_max_position,
        default_max_position=traits.default_max_position,
    )


def _gemma3_rope(config: Mapping[str, Any], traits: Traits, layer_type: str) -> tuple[dict[str, Any], float]:
    """Gemma 3 has one base for sliding layers and another, which alone is scaled, for full ones."""
    plain = dict(config)
    if layer_type == "full_attention":
        return plain, traits.default_theta
    plain.pop("rope_scaling", None)
    plain.pop("rope_theta", None)
    return plain, float(_value(config, "rope_local_base_freq", 10000.0))


def _attention_scale(config: Mapping[str, Any], traits: Traits, head_dim: int) -> float:
    if traits.attention_scale == "query_pre_attn_scalar":
        return math.pow(_value(config, "query_pre_attn_scalar", traits.default_query_pre_attn_scalar), -0.5)
    if traits.attention_scale == "attention_multiplier":
        return float(_value(config, "attention_multiplier", 1.0))
    return math.pow(head_dim, -0.5)


def _embed_scale(config: Mapping[str, Any], traits: Traits) -> float:
    if traits.embed_scale == "sqrt_hidden":
        return math.sqrt(config["hidden_size"])
    if traits.embed_scale == "embedding_multiplier":
        return float(_value(config, "embedding_multiplier", 1.0))
    return 1.0


def _soft_cap(config: Mapping[str, Any], name: str, traits: Traits, default: float | None) -> float | None:
    """A null in the file means none; only an absent field means the architecture's default."""
    if name not in traits.honours:
        return None
    value = config.get(name, default)
    return None if value is None else float(value)
