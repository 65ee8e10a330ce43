"""Finds out, before any weight is read, whether transformers' model can be served and what its layers ask for.

The model is built on the meta device (shapes without data) and run for a few tokens there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hotswap.core.contracts.attention import AttentionLayer
from hotswap.core.contracts.loader import ModelLoadError
from hotswap.core.contracts.model import WeightSpec

from .routing import ROUTED, Probe, register

_PROBE_TOKENS = 3
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


@dataclass(frozen=True, slots=True)
class Examined:
    """What the probe found. module_names: the attention modules, in the order of `layers`. output_class: what the
    decoder returns, for handing hidden states to the head."""

    config: Any
    model_class: Any
    layers: tuple[AttentionLayer, ...]
    module_names: tuple[str, ...]
    output_class: type[Any]
    weights: tuple[WeightSpec, ...]


def examine(hf_config: Mapping[str, Any], max_model_len: int, model_path: str, trust_remote_code: bool) -> Examined:
    """Raises ModelLoadError with every reason why the model cannot be served."""
    config, model_class = _config_and_class(hf_config, model_path, trust_remote_code)
    register()
    try:
        with torch.device("meta"):
            # Shapes are the same in any dtype, and bfloat16 is the one that every op knows on the meta device.
            model = model_class._from_config(config, attn_implementation=ROUTED, dtype=torch.bfloat16)
        model.eval().requires_grad_(False)
        pin_rope(model, max_model_len)
        probe, output = _run_probe(model, max_model_len)
    except ModelLoadError:
        raise
    except Exception as error:  # transformers' modelling code may fail in any way; all of them mean the same here
        if isinstance(error, KeyError) and error.args == (ROUTED,):
            raise refusal(model_class, "it does not use transformers' attention interface") from error
        raise refusal(
            model_class, f"running it with routed attention failed: {type(error).__name__}: {error}"
        ) from error
    problems = [*probe.problems, *_layer_problems(config.get_text_config(decoder=True), probe.layers, max_model_len)]
    if problems:
        raise refusal(model_class, "; ".join(dict.fromkeys(problems)))
    names = {module: name for name, module in model.named_modules()}
    return Examined(
        config=config,
        model_class=model_class,
        layers=tuple(probe.layers),
        module_names=tuple(names[module] for module in probe.modules),
        output_class=type(output),
        weights=tuple(_weight_specs(model)),
    )


def refusal(model_class: Any, reason: str) -> ModelLoadError:
    """The error that says why this model is not served."""
    return ModelLoadError(
        f"{model_class.__name__} of transformers {transformers.__version__} cannot be served: {reason}"
    )


def _config_and_class(hf_config: Mapping[str, Any], model_path: str, trust_remote_code: bool) -> tuple[Any, Any]:
    architectures = list(hf_config.get("architectures") or ())
    model_type = hf_config.get("model_type")
    mapping_of_configs = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    known = model_type in mapping_of_configs
    if not known and hf_config.get("auto_map"):
        if not trust_remote_code:
            raise ModelLoadError(
                f"architecture {architectures} brings its own Python code, which is not run without --trust-remote-code"
            )
        config = transformers.AutoConfig.from_pretrained(model_path, trust_remote_code=True)
        with torch.device("meta"):
            return config, type(transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True))
    if not known:
        raise ModelLoadError(
            f"architectures {architectures}: transformers {transformers.__version__} knows no model type {model_type!r}"
        )
    try:
        config = mapping_of_configs[model_type].from_dict(_plain_numbers(dict(hf_config)))
    except Exception as error:  # config classes check their fields in many ways; each says what is wrong
        raise ModelLoadError(f"config.json is not one of model type {model_type!r}: {error}") from error
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder or type(config) not in mapping:
        raise ModelLoadError(
            f"architectures {architectures}: transformers has no decoder-only language model of type {model_type!r}"
        )
    model_class = mapping[type(config)]
    if model_class.__name__ not in architectures:
        raise ModelLoadError(
            f"architectures {architectures} are not served; the one of {model_type!r} is {model_class.__name__}"
        )
    return config, model_class


def _run_probe(model: Any, max_model_len: int) -> tuple[Probe, Any]:
    probe = Probe(max_model_len)
    for module in model.modules():
        module.hotswap_attention = probe
    embedding = model.get_input_embeddings()
    with torch.inference_mode(), torch.device("meta"):
        embeds = embedding(torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64))
        positions = torch.arange(_PROBE_TOKENS).unsqueeze(0)
        output = run_decoder(decoder_of(model), embeds, positions)
    if not isinstance(getattr(output, "last_hidden_state", None), torch.Tensor):
        raise ModelLoadError(f"{type(model).__name__} cannot be served: its decoder returns no last_hidden_state")
    return probe, output


def _plain_numbers(value: Any) -> Any:
    """JSON has no infinities; transformers writes them as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _plain_numbers(item) for name, item in value.items()}
    return [_plain_numbers(item) for item in value] if isinstance(value, list) else value


def decoder_of(model: Any) -> Any:
    """The stack of layers, without the head."""
    decoder = model.get_decoder()
    return model.model if decoder is model and hasattr(model, "model") else decoder


def run_decoder(decoder: Any, embeds: torch.Tensor, positions: torch.Tensor) -> Any:
    """embeds [1, T, H], positions [1, T] -> the decoder's output object. No cache and no mask: both are the
    engine's."""
    return decoder(inputs_embeds=embeds, position_ids=positions, use_cache=False, return_dict=True)


def _layer_problems(config: Any, layers: list[AttentionLayer], max_model_len: int) -> list[str]:
    problems = []
    if len(layers) != config.num_hidden_layers:
        problems.append(
            f"{len(layers)} of its {config.num_hidden_layers} layers attend through transformers' attention interface; "
            "the others mix tokens by other means, or have attention code of their own"
        )
        return problems
    types = getattr(config, "layer_types", None) or []
    if unknown := sorted(set(types) - _LAYER_TYPES):
        problems.append(f"layers of type {', '.join(unknown)}")
    slides = [kind == "sliding_attention" for kind in types] or [False] * len(layers)
    window = getattr(config, "sliding_window", None)
    if (
        not types
        and window is not None
        and getattr(config, "use_sliding_window", True)
        and all(la.window is None for la in layers)
    ):
        slides = [True] * len(layers)
    if window is None or window < max_model_len:
        silent = [la.index for la, sliding in zip(layers, slides, strict=False) if sliding and la.window is None]
        if silent:
            problems.append(f"layers {silent} have a sliding window that they do not pass to the attention function")
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < max_model_len:
        problems.append(f"attention in chunks of {chunk} tokens")
    return problems


def _weight_specs(model: Any) -> list[WeightSpec]:
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return [WeightSpec(name, tuple(tensor.shape), name in tied) for name, tensor in model.state_dict().items()]


def pin_rope(model: Any, max_model_len: int) -> None:
    """Fixes rotations that would change with the longest position of a batch (dynamic, longrope) to those of
    `max_model_len`.

    Otherwise a request's result would depend on its batch mates, and cached keys would go stale.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            if _moves(kinds):
                _pin(module, kinds, None, max_model_len)
                module.rope_type = "default"
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if _moves(kind):
                    _pin(module, kind, layer_type, max_model_len)
            module.rope_type = {layer_type: "default" if _moves(kind) else kind for layer_type, kind in kinds.items()}


def _moves(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _pin(module: Any, kind: str, layer_type: str | None, max_model_len: int) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer = getattr(module, f"{prefix}inv_freq")
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](
        module.config, buffer.device, seq_len=max_model_len, layer_type=layer_type
    )
    module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
    setattr(module, "attention_scaling" if layer_type is None else f"{prefix}attention_scaling", scale)
