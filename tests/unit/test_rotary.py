"""Rotation tables against transformers' (J04, J09)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hotswap.core.errors import ModelLoadError
from hotswap.core.layers.rotary import RopeTables, cos_sin_table, inverse_frequencies, rope_config

WINDOW = 64  # the original window in these configs
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": WINDOW},
    "yarn-mscale": {"factor": 4.0, "original_max_position_embeddings": WINDOW, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn-given": {
        "factor": 4.0,
        "original_max_position_embeddings": WINDOW,
        "attention_factor": 1.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": WINDOW,
    },
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + 1.5 * i for i in range(8)],
        "original_max_position_embeddings": WINDOW,
    },
    "longrope-given": {
        "attention_factor": 1.3,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": WINDOW,
    },
}


def base_config(kind: str) -> dict[str, Any]:
    longest = WINDOW if kind in ("default", "linear", "dynamic") else 4 * WINDOW
    return {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": longest}


def our_config(kind: str, spelling: str) -> dict[str, Any]:
    """The same rotation as the two generations of transformers write it."""
    name, scaling = kind.partition("-")[0], SCALINGS[kind]
    if spelling == "rope_parameters":
        return {**base_config(kind), "rope_parameters": {"rope_type": name, "rope_theta": 5000.0, **scaling}}
    old = {} if name == "default" else {"rope_scaling": {spelling: name, **scaling}}
    return {**base_config(kind), "rope_theta": 5000.0, **old}


def their_table(kind: str, length: int) -> Tensor:
    """cos | sin of transformers for contexts of `length`, the frequencies chosen once."""
    name = kind.partition("-")[0]
    parameters = {"rope_type": name, "rope_theta": 5000.0, **SCALINGS[kind]}
    config = AutoConfig.for_model("llama", **base_config(kind), rope_parameters=parameters)
    module = LlamaRotaryEmbedding(config)
    if name in ("dynamic", "longrope"):
        frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), seq_len=length)
        module.register_buffer("inv_freq", frequencies, persistent=False)
        module.rope_type = "default"
    cos, sin = module(torch.zeros(1), torch.arange(length).unsqueeze(0))
    return torch.cat((cos[0, :, :8], sin[0, :, :8]), dim=1)


@pytest.mark.parametrize("length", [WINDOW // 2, WINDOW, WINDOW + 1, 4 * WINDOW])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_type", "type"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_tables_equal_those_of_transformers(kind: str, spelling: str, length: int) -> None:
    config = rope_config(our_config(kind, spelling), head_dim=16)
    torch.testing.assert_close(cos_sin_table(config, length), their_table(kind, length), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_the_choice_depends_on_the_longest_context_only(kind: str) -> None:
    """J09: within one process every position has one rotation, however long its request is by now."""
    config = rope_config(our_config(kind, "type"), head_dim=16)
    short, long = cos_sin_table(config, WINDOW), cos_sin_table(config, 4 * WINDOW)
    assert not torch.allclose(short, long[:WINDOW])
    assert torch.equal(cos_sin_table(config, WINDOW // 2), short[: WINDOW // 2])
    assert long.shape == (4 * WINDOW, 16)


def test_dynamic_and_linear_differ() -> None:
    dynamic, _ = inverse_frequencies(rope_config(our_config("dynamic", "type"), 16), WINDOW)
    default, _ = inverse_frequencies(rope_config(our_config("default", "type"), 16), WINDOW)
    linear, _ = inverse_frequencies(rope_config(our_config("linear", "type"), 16), WINDOW)
    assert torch.equal(dynamic, default)  # nothing to stretch within the window
    torch.testing.assert_close(linear, default / 4)


def test_partial_rotation() -> None:
    for config in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}):
        assert rope_config({"max_position_embeddings": 8, **config}, 16).rotary_dim == 8
    with pytest.raises(ModelLoadError, match="3 rotary dimensions"):
        rope_config({"partial_rotary_factor": 0.2}, 16)


def test_the_outer_original_window_wins() -> None:
    inner = SCALINGS["longrope"]
    config: dict[str, Any] = {"max_position_embeddings": 512, "original_max_position_embeddings": 128}
    config = {**config, "rope_scaling": {"type": "su", **inner}}
    assert rope_config(config, 16).original_max_position == 128
    assert rope_config(config, 16).kind == "longrope"


def test_nested_parameters() -> None:
    nested = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_theta": 7.0}}
    config = {"max_position_embeddings": 8, "rope_parameters": nested}
    assert rope_config(config, 16, layer_type="full_attention").factor == 8.0
    assert rope_config(config, 16, layer_type="sliding_attention").theta == 7.0


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "ntk-magic", "factor": 2.0}, "unknown rope type 'ntk-magic'; known: default, linear"),
        ({"rope_type": "mrope", "mrope_section": [1, 1]}, "unknown rope type 'mrope'"),
        ({"type": "linear"}, "'linear' needs factor"),
        ({"type": "llama3", "factor": 2.0}, "needs low_freq_factor, high_freq_factor"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor needs 8 numbers, found 1"),
        ({"type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "alpha=1000.0 is not known"),
        (7, "must be an object"),
    ],
)
def test_what_cannot_be_honoured_is_refused(scaling: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        rope_config({"max_position_embeddings": 64, "rope_scaling": scaling}, head_dim=16)


def test_layers_that_rotate_alike_share_a_table() -> None:
    tables = RopeTables(32)
    first = tables.get(rope_config(our_config("yarn", "type"), 16))
    assert tables.get(rope_config(our_config("yarn", "rope_type"), 16)) is first
    assert tables.get(rope_config(our_config("linear", "type"), 16)) is not first
