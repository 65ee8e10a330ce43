"""A GGUF file as a checkpoint: config, names, the undone permutation and offsets, parts, folders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotswap.core.contracts.loader import ModelLoadError
from hotswap.plugins.loaders.gguf import GGUFCheckpoint, GGUFLoader

gguf: Any = pytest.importorskip("gguf")

HEADS, KV_HEADS, HIDDEN, FFN, VOCAB = 4, 2, 64, 96, 40


def writer_for(path: Path, arch: str = "llama", **numbers: Any) -> Any:
    writer = gguf.GGUFWriter(str(path), arch)
    keys: dict[str, Any] = {
        "context_length": 128, "embedding_length": HIDDEN, "block_count": 1, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, **numbers,
    }  # fmt: skip
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    return writer


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hf_weights(seed: int = 0, head_dim: int = HIDDEN // HEADS) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (HEADS * head_dim, HIDDEN),
        layer + "self_attn.k_proj.weight": (KV_HEADS * head_dim, HIDDEN),
        layer + "self_attn.v_proj.weight": (KV_HEADS * head_dim, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * head_dim),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "mlp.gate_proj.weight": (FFN, HIDDEN),
        layer + "mlp.up_proj.weight": (FFN, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, FFN),
        "model.norm.weight": (HIDDEN,),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers.0.input_layernorm": "blk.0.attn_norm", "model.layers.0.self_attn.q_proj": "blk.0.attn_q",
    "model.layers.0.self_attn.k_proj": "blk.0.attn_k", "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    "model.layers.0.self_attn.o_proj": "blk.0.attn_output", "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
    "model.layers.0.mlp.up_proj": "blk.0.ffn_up", "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
}  # fmt: skip


def stored_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    return f"{GGUF_NAMES[stem]}.{suffix}"


def paired(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows as llama.cpp keeps them: element i of a head's first half beside element i of its second half."""
    half = weight.shape[0] // heads // 2
    rows = [weight[h * 2 * half + part * half + i] for h in range(heads) for i in range(half) for part in (0, 1)]
    return np.stack(rows)


def save_llama(
    path: Path, weights: dict[str, np.ndarray[Any, Any]], quantized: str | None = None, **numbers: Any
) -> Path:
    writer = writer_for(path, **numbers)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    writer.add_chat_template("{{ messages }}")
    for name, weight in weights.items():
        if "q_proj" in name or "k_proj" in name:
            weight = paired(weight, HEADS if "q_proj" in name else KV_HEADS)
        if quantized is not None and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantized]
            writer.add_tensor(stored_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored_name(name), weight)
    finish(writer)
    return path


def opened(path: Path) -> GGUFCheckpoint:
    return GGUFLoader().open(path)


def test_weights_come_back_under_their_own_names(tmp_path: Path) -> None:
    weights = hf_weights()
    with opened(save_llama(tmp_path / "m.gguf", weights)) as checkpoint:
        assert set(checkpoint.weight_names()) == set(weights)
        assert checkpoint.total_bytes == sum(weight.nbytes for weight in weights.values())
        loaded = dict(checkpoint.weights(torch.float32))
        some = dict(checkpoint.weights(torch.bfloat16, names={"model.norm.weight"}))
    assert {name: list(tensor.shape) for name, tensor in loaded.items()} == {
        n: list(w.shape) for n, w in weights.items()
    }
    for name, weight in weights.items():
        np.testing.assert_array_equal(loaded[name].numpy(), weight, err_msg=name)
    assert list(some) == ["model.norm.weight"] and some["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "BF16", "F16"])
def test_quantized_weights_are_the_dequantized_originals(tmp_path: Path, kind: str) -> None:
    weights = hf_weights()
    with opened(save_llama(tmp_path / "m.gguf", weights, quantized=kind)) as checkpoint:
        loaded = dict(checkpoint.weights(torch.float32))
    code = gguf.GGMLQuantizationType[kind]
    for name, weight in weights.items():
        expected = gguf.quants.dequantize(gguf.quants.quantize(weight, code), code) if weight.ndim == 2 else weight
        np.testing.assert_array_equal(loaded[name].numpy(), expected, err_msg=name)


def test_large_tensors_are_converted_in_chunks_without_seams(tmp_path: Path) -> None:
    weight = np.random.default_rng(4).standard_normal((3000, 256)).astype(np.float32)
    weights = {**hf_weights(), "lm_head.weight": weight}
    with opened(save_llama(tmp_path / "m.gguf", weights, quantized="Q8_0")) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False
        loaded = dict(checkpoint.weights(torch.bfloat16))["lm_head.weight"]
    code = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(weight, code), code)
    assert torch.equal(loaded, torch.from_numpy(expected).to(torch.bfloat16))


def test_config_in_huggingface_names(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"rope.freq_base": 5e5}
    path = save_llama(tmp_path / "m.gguf", hf_weights(), **numbers)
    with opened(path) as checkpoint:
        config = checkpoint.config
        assert checkpoint.eos_token_ids == (2, 7) and checkpoint.generation_config["eos_token_id"] == [2, 7]
        assert checkpoint.chat_template == "{{ messages }}" and not checkpoint.needs_remote_code
    expected = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 16,
        "intermediate_size": FFN, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 5e5,
        "rope_scaling": None, "tie_word_embeddings": True, "attention_bias": False, "eos_token_id": 2,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected


def save_bare(path: Path, arch: str, tensors: dict[str, np.ndarray[Any, Any]] | None = None, **numbers: Any) -> Path:
    writer = writer_for(path, arch, **numbers)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.float32))
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return path


@pytest.mark.parametrize(
    ("arch", "numbers", "expected"),
    [
        ("qwen2", {}, {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}),
        ("qwen3", {"attention.key_length": 32}, {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}),
        (
            "llama",
            {"attention.sliding_window": 32},
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32},
        ),
        ("gemma", {}, {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}),
        (
            "gemma2",
            {"attention.sliding_window": 32, "attn_logit_softcapping": 50.0},
            {"model_type": "gemma2", "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16},
        ),
        ("gemma3", {"attention.sliding_window": 32}, {"layer_types": ["sliding_attention"], "sliding_window": 32}),
        (
            "phi3",
            {"rope.dimension_count": 12, "rope.scaling.original_context_length": 64},
            {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64},
        ),
        (
            "qwen2",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            {
                "rope_scaling": {
                    "rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                }
            },
        ),
        (
            "llama",
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
        ),
    ],
)  # fmt: skip
def test_each_architecture(tmp_path: Path, arch: str, numbers: dict[str, Any], expected: dict[str, Any]) -> None:
    with opened(save_bare(tmp_path / "m.gguf", arch, **numbers)) as checkpoint:
        assert {key: checkpoint.config[key] for key in expected} == expected


def llama3_factors(
    base: float, dim: int, factor: float, low: float, high: float, original: int
) -> np.ndarray[Any, Any]:
    """The divisors as the rule states them, one wavelength at a time."""
    out = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * base ** (i / dim)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize(("head_dim", "factor"), [(64, 32.0), (128, 8.0)])
def test_llama3_rotary_scaling_is_recovered(tmp_path: Path, head_dim: int, factor: float) -> None:
    factors = {"rope_freqs.weight": llama3_factors(5e5, head_dim, factor, 1.0, 4.0, 8192)}
    numbers = {"rope.freq_base": 5e5, "attention.key_length": head_dim}
    with opened(save_bare(tmp_path / "m.gguf", "llama", factors, **numbers)) as checkpoint:
        assert "rope_freqs.weight" not in checkpoint.weight_names()
        scaling = checkpoint.config["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3", "type": "llama3", "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_rotary_factors_of_another_rule_are_refused(tmp_path: Path) -> None:
    odd = {"rope_freqs.weight": np.linspace(8, 1, 32).astype(np.float32)}
    with pytest.raises(ModelLoadError, match="llama3 rule"):
        opened(save_bare(tmp_path / "m.gguf", "llama", odd, **{"rope.freq_base": 5e5}))


def test_longrope_factors_come_from_tensors(tmp_path: Path) -> None:
    long, short = np.arange(1, 9, dtype=np.float32), np.ones(8, np.float32)
    tensors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    with opened(save_bare(tmp_path / "m.gguf", "phi3", tensors)) as checkpoint:
        scaling = checkpoint.config["rope_scaling"]
    assert (scaling["rope_type"], scaling["long_factor"]) == ("longrope", long.tolist())


def test_gemma_norms_lose_the_one_that_the_file_adds(tmp_path: Path) -> None:
    norm = np.random.default_rng(2).standard_normal(HIDDEN).astype(np.float32)
    tensors = {
        "output_norm.weight": norm + 1,
        "blk.0.ffn_norm.weight": norm + 1,
        "blk.0.post_ffw_norm.weight": norm + 1,
    }
    with opened(save_bare(tmp_path / "m.gguf", "gemma2", tensors)) as checkpoint:
        loaded = dict(checkpoint.weights(torch.float32))
    names = ("model.norm", "model.layers.0.pre_feedforward_layernorm", "model.layers.0.post_feedforward_layernorm")
    for name in names:
        np.testing.assert_allclose(loaded[name + ".weight"].numpy(), norm, atol=1e-6)


def test_phi3_fused_names(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_qkv.weight": np.zeros((128, HIDDEN), np.float32)}
    tensors["blk.0.ffn_up.weight"] = np.zeros((2 * FFN, HIDDEN), np.float32)
    with opened(save_bare(tmp_path / "m.gguf", "phi3", tensors)) as checkpoint:
        names = set(checkpoint.weight_names())
    assert {"model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"} <= names


@pytest.mark.parametrize(
    ("arch", "numbers", "message"),
    [
        ("mamba", {}, "'mamba' is not supported; supported are"),
        ("llama", {"expert_count": 8}, "mixture-of-experts"),
        ("llama", {"block_count": 0}, "block_count is 0"),
        ("llama", {"rope.scaling.type": "odd", "rope.scaling.factor": 2.0}, "'odd'"),
        ("llama", {"context_length": "long"}, "context_length"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, arch: str, numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        opened(save_bare(tmp_path / "m.gguf", arch, **numbers))


def test_rows_that_do_not_fit_the_heads_are_refused(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": np.zeros((63, HIDDEN), np.float32)}
    checkpoint = opened(save_bare(tmp_path / "m.gguf", "llama", tensors))
    with checkpoint, pytest.raises(ModelLoadError, match=r"blk\.0\.attn_q\.weight"):
        list(checkpoint.weights(torch.float32))


def split(folder: Path) -> list[Path]:
    parts = [folder / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    save_bare(parts[0], "llama", {"output_norm.weight": np.ones(HIDDEN, np.float32)})
    writer = gguf.GGUFWriter(str(parts[1]), "llama")
    writer.add_tensor("blk.0.attn_norm.weight", np.full(HIDDEN, 2, np.float32))
    finish(writer)
    return parts


def test_parts_are_read_together_and_all_must_be_there(tmp_path: Path) -> None:
    parts = split(tmp_path)
    for path in (parts[0], tmp_path):
        assert GGUFLoader().accepts(path)
        with opened(path) as checkpoint:
            loaded = dict(checkpoint.weights(None))
        assert loaded["model.layers.0.input_layernorm.weight"].tolist() == [2.0] * HIDDEN
    with pytest.raises(ModelLoadError, match="first part"):
        opened(parts[1])
    parts[1].unlink()
    with pytest.raises(ModelLoadError, match=r"00002-of-00002\.gguf: this part of the model is missing"):
        opened(parts[0])


def test_a_folder_must_hold_one_model(tmp_path: Path) -> None:
    save_bare(tmp_path / "a.gguf", "llama")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF")
    with opened(tmp_path) as checkpoint:
        assert checkpoint.config["model_type"] == "llama"
    save_bare(tmp_path / "b.gguf", "llama")
    with pytest.raises(ModelLoadError, match=r"2 GGUF models \(a\.gguf, b\.gguf\)"):
        opened(tmp_path)


def test_files_are_known_by_their_magic(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nope")
    (tmp_path / "y").write_bytes(b"GGUF....")
    loader = GGUFLoader()
    assert not loader.accepts(tmp_path / "x.gguf") and loader.accepts(tmp_path / "y")
    assert not loader.accepts(tmp_path / "missing")


def test_smollm2_loads_whole(smollm2_path: Path) -> None:
    with opened(smollm2_path) as checkpoint:
        assert len(checkpoint.weight_names()) == 272 and checkpoint.eos_token_ids == (2,)
        loaded = dict(checkpoint.weights(torch.bfloat16))
    assert loaded["model.embed_tokens.weight"].shape == (49152, 576)
    assert sum(tensor.numel() for tensor in loaded.values()) == 134_515_008
    assert all(torch.isfinite(tensor).all() for tensor in loaded.values())
