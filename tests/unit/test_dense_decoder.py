"""The native dense decoder against transformers, family by family, on tiny random checkpoints in float32."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hotswap.core.contracts.attention import CacheSpec
from hotswap.core.contracts.kernels import PackedWeight
from hotswap.core.errors import ModelLoadError
from hotswap.core.layers.ops import OpTable
from hotswap.core.layers.reference import ReferenceLinear, gelu_tanh_mul, silu_mul
from hotswap.core.testing.forward_harness import ForwardHarness, model_context, quantization_context, read_safetensors
from hotswap.core.testing.tiny_models import TINY_MODELS, make_tiny_model
from hotswap.plugins.attention.torch_reference.backend import TorchReferenceAttention
from hotswap.plugins.models.dense_decoder import hotswap_model
from hotswap.plugins.models.dense_decoder.config import dense_config, text_config
from hotswap.plugins.models.dense_decoder.model import DenseDecoder
from hotswap.plugins.models.dense_decoder.traits import TRAITS
from hotswap.plugins.models.transformers_fallback.examine import pin_rope
from hotswap.plugins.quantization.none.method import PlainQuantization

MAX_LEN = 96
NATIVE = [
    name
    for name, tiny in TINY_MODELS.items()
    if tiny.model_type
    in ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text", "olmo2", "smollm3", "granite")
]
PROMPT = torch.randint(4, 300, (44,), generator=torch.Generator().manual_seed(1)).tolist()


@dataclass(frozen=True)
class Checkpoint:
    """A tiny checkpoint and transformers' model of it, its rotation fixed to contexts of MAX_LEN."""

    name: str
    folder: Path
    config: dict[str, Any]
    oracle: Any

    def weights(self) -> dict[str, Tensor]:
        return dict(read_safetensors(self.folder))

    def expected(self, token_ids: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.oracle(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose a lot where other tests run beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Makes each checkpoint once."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            folder = make_tiny_model(tmp_path_factory.mktemp(name), name, tokenizer=False)
            # Eager: the one implementation that knows soft caps in every version of transformers.
            oracle = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            pin_rope(oracle, MAX_LEN)
            made[name] = Checkpoint(name, folder, json.loads((folder / "config.json").read_text()), oracle)
        return made[name]

    return get


def build(
    config: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    max_model_len: int = MAX_LEN,
    activation_dtype: torch.dtype | None = None,
) -> DenseDecoder:
    quantization = PlainQuantization(quantization_context(dtype=dtype))
    return DenseDecoder(
        model_context(config, quantization, dtype=dtype, activation_dtype=activation_dtype, max_model_len=max_model_len)
    )


def loaded(
    config: dict[str, Any],
    weights: dict[str, Tensor],
    dtype: torch.dtype = torch.float32,
    activation_dtype: torch.dtype | None = None,
) -> ForwardHarness:
    model = build(config, dtype, activation_dtype=activation_dtype)
    model.load_weights(weights.items())
    return ForwardHarness(model, TorchReferenceAttention(), block_size=4)


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < 1e-5, f"relative error {error:.2e}"


@pytest.mark.parametrize("name", NATIVE)
def test_logits_and_greedy_tokens_equal_those_of_transformers(
    name: str, checkpoint_of: Callable[[str], Checkpoint]
) -> None:
    """A whole prompt, the same in chunks, and a batch of prompts that prefill in chunks beside each other's decodes.

    A greedy continuation is right when the oracle, fed with it, would have chosen each of its tokens.
    """
    checkpoint = checkpoint_of(name)
    harness = loaded(checkpoint.config, checkpoint.weights())
    assert harness.model.supports_graphs
    assert_same_logits(harness.logits(PROMPT), checkpoint.expected(PROMPT))
    assert_same_logits(harness.logits(PROMPT, chunk_size=7), checkpoint.expected(PROMPT))
    prompts = [PROMPT[:5], PROMPT[3:33], PROMPT[:1], PROMPT[10:27]]
    outputs = harness.generate(prompts, max_tokens=16, chunk_size=6)
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = checkpoint.expected([*prompt, *output])
        assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len({token for output in outputs for token in output}) > 8, "a model that repeats itself tests little"


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2"])
def test_bfloat16_is_no_coarser_than_that_of_transformers(
    name: str, checkpoint_of: Callable[[str], Checkpoint]
) -> None:
    checkpoint = checkpoint_of(name)
    found = loaded(checkpoint.config, checkpoint.weights(), torch.bfloat16).logits(PROMPT)
    mixed = loaded(checkpoint.config, checkpoint.weights(), torch.bfloat16, torch.float32).logits(PROMPT)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint.folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        theirs = oracle(torch.tensor([PROMPT]), use_cache=False).logits[0].float()
    exact = checkpoint.expected(PROMPT)
    assert (found - exact).norm() < 1.1 * (theirs - exact).norm()
    assert (mixed - exact).norm() < 0.9 * (theirs - exact).norm(), "float32 activations beside bfloat16 weights"


@pytest.mark.parametrize("name", NATIVE)
def test_weight_specs_are_the_checkpoint_s(name: str, checkpoint_of: Callable[[str], Checkpoint]) -> None:
    checkpoint = checkpoint_of(name)
    specs = list(build(checkpoint.config).weight_specs())
    stored = {name: tuple(tensor.shape) for name, tensor in checkpoint.weights().items()}
    assert {spec.name: spec.shape for spec in specs if spec.name in stored} == stored
    absent = {spec.name for spec in specs} - set(stored)
    assert all(spec.optional for spec in specs if spec.name in absent)
    assert absent == ({"lm_head.weight"} if build(checkpoint.config).config.tied else set())


# Configs


@pytest.mark.parametrize("architecture", TRAITS)
def test_absent_fields_mean_what_transformers_takes_them_for(architecture: str) -> None:
    model_type = architecture.removesuffix("ForCausalLM").lower().replace("gemma3", "gemma3_text")
    sizes = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 64,
        "num_hidden_layers": 7,
        "num_attention_heads": 32 if model_type not in ("gemma",) else 16,
        "pad_token_id": 0,
    }
    theirs = transformers.AutoConfig.for_model(model_type, **sizes)
    ours = dense_config({"architectures": [architecture], **sizes})
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 256 // sizes["num_attention_heads"])
    assert ours.eps == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.activation == getattr(theirs, "hidden_activation", None) or theirs.hidden_act
    assert ours.logit_soft_cap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.attention_soft_cap == getattr(theirs, "attn_logit_softcapping", None)
    rope = theirs.rope_parameters
    types = getattr(theirs, "layer_types", None) or ["full_attention"] * 7
    for index, kind in enumerate(types):
        wanted = rope.get(kind, rope)["rope_theta"]
        rotated = (getattr(theirs, "no_rope_layers", None) or [1] * 7)[index]
        mine = ours.ropes[index]
        assert (mine.theta if mine is not None else None) == (wanted if rotated else None)
    window = getattr(theirs, "sliding_window", None)
    everywhere = model_type in ("mistral", "phi3")
    assert ours.windows == tuple(window if everywhere or kind == "sliding_attention" else None for kind in types)


def test_the_config_of_transformers_4_means_the_same(checkpoint_of: Callable[[str], Checkpoint]) -> None:
    checkpoint = checkpoint_of("llama-yarn")
    scaling = dict(checkpoint.config["rope_parameters"])
    old = {key: value for key, value in checkpoint.config.items() if key != "rope_parameters"}
    old["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    old["rope_scaling"] = scaling
    assert_same_logits(loaded(old, checkpoint.weights()).logits(PROMPT), checkpoint.expected(PROMPT))


def test_a_null_head_dim_is_derived(checkpoint_of: Callable[[str], Checkpoint]) -> None:
    checkpoint = checkpoint_of("llama")
    config = {**checkpoint.config, "head_dim": None}
    assert_same_logits(loaded(config, checkpoint.weights()).logits(PROMPT), checkpoint.expected(PROMPT))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"hidden_act": "relu2"}, "hidden_act='relu2'"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ("llama", {"sliding_window": 8}, "sliding_window=8 has no meaning for LlamaForCausalLM"),
        ("llama", {"clip_qkv": 8.0, "logits_scaling": 2.0}, "clip_qkv=8.0 has no meaning.*logits_scaling=2.0 has no"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"rope_scaling": {"type": "magic"}}, "unknown rope type 'magic'"),
        ("llama", {"hidden_size": 50, "head_dim": None}, "hidden_size=50 is no multiple"),
        ("mistral", {"attention_bias": True}, "attention_bias=True has no meaning for MistralForCausalLM"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types mixes"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0 must be positive"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layer_types must be one"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 3 layers"),
        ("llama", {"architectures": ["OtherForCausalLM"]}, "OtherForCausalLM"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    name: str, change: dict[str, Any], message: str, checkpoint_of: Callable[[str], Checkpoint]
) -> None:
    config = {**checkpoint_of(name).config, **change}
    if "partial_rotary_factor" in change or "rope_scaling" in change:
        config.pop("rope_parameters")
    with pytest.raises(ModelLoadError, match=message):
        build(config)


def test_neutral_values_of_those_fields_are_fine(checkpoint_of: Callable[[str], Checkpoint]) -> None:
    harmless = {"clip_qkv": None, "rope_interleaved": False, "partial_rotary_factor": 1.0, "num_experts": 0}
    build({**checkpoint_of("llama").config, **harmless})
    build({**checkpoint_of("qwen2").config, "attention_bias": True})


def test_a_nested_text_config_decides() -> None:
    """J02: the flag of the inner config, not of the outer one; the outer one where the inner one is silent."""
    outer = {"tie_word_embeddings": True, "dtype": "float32"}
    nested = text_config({**outer, "text_config": {"tie_word_embeddings": False}})
    assert nested == {"tie_word_embeddings": False, "dtype": "float32"}
    assert text_config({**outer, "text_config": {"hidden_size": 4}})["tie_word_embeddings"] is True


# Weights


def test_an_untied_checkpoint_without_head_is_refused(checkpoint_of: Callable[[str], Checkpoint]) -> None:
    """J01."""
    checkpoint = checkpoint_of("llama")
    weights = checkpoint.weights()
    del weights["lm_head.weight"]
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensor.*lm_head\.weight"):
        build(checkpoint.config).load_weights(weights.items())


@pytest.mark.parametrize("different", [False, True])
def test_a_tied_checkpoint_with_a_head(different: bool, checkpoint_of: Callable[[str], Checkpoint]) -> None:
    """J02, end to end: transformers decides the same way."""
    checkpoint = checkpoint_of("llama-tied")
    weights = checkpoint.weights()
    head = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"] = head * 0.5 + 0.1 if different else head
    found = loaded(checkpoint.config, weights).logits(PROMPT)
    with torch.inference_mode():
        hidden = checkpoint.oracle.model(torch.tensor([PROMPT]), use_cache=False).last_hidden_state[0]
    assert_same_logits(found, hidden @ weights["lm_head.weight"].T)


def test_a_nested_flag_keeps_a_real_head(checkpoint_of: Callable[[str], Checkpoint]) -> None:
    checkpoint = checkpoint_of("llama")
    outer = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    config = {**outer, "text_config": {**checkpoint.config, "tie_word_embeddings": False}}
    assert_same_logits(loaded(config, checkpoint.weights()).logits(PROMPT), checkpoint.expected(PROMPT))


def test_tensors_that_do_not_fit_are_named(checkpoint_of: Callable[[str], Checkpoint]) -> None:
    checkpoint = checkpoint_of("llama")
    weights = checkpoint.weights()
    weights["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(48, 48)
    message = r"model\.layers\.1\.self_attn\.k_proj\.weight has the shape \[48, 48\]; the config asks for \[24, 48\]"
    with pytest.raises(ModelLoadError, match=message):
        build(checkpoint.config).load_weights(weights.items())


def test_unused_tensors_are_reported(checkpoint_of: Callable[[str], Checkpoint]) -> None:
    checkpoint = checkpoint_of("llama")
    weights = checkpoint.weights()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    weights["model.extra"] = torch.zeros(6)
    report = build(checkpoint.config).load_weights(reversed(weights.items()))
    assert (report.missing, report.unexpected) == ([], ["model.extra"])


# The contract


def test_forward_leaves_its_inputs_alone(checkpoint_of: Callable[[str], Checkpoint]) -> None:
    checkpoint = checkpoint_of("llama")
    model = build(checkpoint.config)
    model.load_weights(checkpoint.weights().items())

    class Context:
        def attend(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, *rotation: Any) -> Tensor:
            return torch.zeros_like(query)

    embeds = model.embed(torch.tensor([4, 5, 6]))
    kept = embeds.clone()
    hidden = model.forward(embeds, torch.arange(3), Context())
    assert torch.equal(embeds, kept)
    assert hidden.shape == (3, 48)
    with pytest.raises(ModelLoadError, match="no other stage"):
        model.forward(embeds, torch.arange(3), Context(), {"hidden": embeds})


def test_cache_specs_are_one_group_and_windows_are_in_the_layers(checkpoint_of: Callable[[str], Checkpoint]) -> None:
    model = build(checkpoint_of("gemma2").config)
    assert set(model.cache_specs()) == {model.cache_specs()[0]}
    spec = model.cache_specs()[0]
    assert spec == CacheSpec("full", 2, 16, 16, "float32")
    assert [layer.window for layer in model.attention_layers()] == [8, None, 8]
    assert [layer.index for layer in model.attention_layers()] == [0, 1, 2]
    assert {layer.soft_cap for layer in model.attention_layers()} == {50.0}
    short = build(checkpoint_of("gemma2").config, max_model_len=8)
    assert [layer.window for layer in short.attention_layers()] == [None] * 3, "a window that nothing leaves is none"


def test_the_provider_names_its_architectures(checkpoint_of: Callable[[str], Checkpoint]) -> None:
    (provider,) = hotswap_model()
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"} <= set(
        provider.architectures
    )
    context = model_context(checkpoint_of("llama").config, PlainQuantization(quantization_context()))
    assert isinstance(provider.build(context), DenseDecoder)


class FusingLinear(ReferenceLinear):
    """Does both fused forms, and counts them."""

    def __init__(self) -> None:
        self.gated = self.added = 0

    def apply_gated(self, x: Tensor, weight: PackedWeight, op: str) -> Tensor:
        self.gated += 1
        return {"silu_mul": silu_mul, "gelu_tanh_mul": gelu_tanh_mul}[op](self.apply(x, weight, None))

    def add_product(self, x: Tensor, weight: PackedWeight, residual: Tensor) -> bool:
        self.added += 1
        residual.add_(self.apply(x, weight, None))
        return True


@pytest.mark.parametrize(
    ("name", "gated", "added"),
    [
        ("llama", True, True),
        ("llama-bias", False, False),  # neither form has a bias
        ("gemma2", True, False),  # a norm stands between product and sum
        ("olmo2", True, False),
        ("granite", True, False),  # so does a factor
    ],
)
def test_products_that_are_fused_change_nothing(
    checkpoint_of: Callable[[str], Checkpoint], name: str, gated: bool, added: bool
) -> None:
    checkpoint, linear = checkpoint_of(name), FusingLinear()
    ops = replace(OpTable.reference(), linear=linear)
    quantization = PlainQuantization(quantization_context(ops=ops))
    model = DenseDecoder(model_context(checkpoint.config, quantization, ops=ops, max_model_len=MAX_LEN))
    model.load_weights(checkpoint.weights().items())
    harness = ForwardHarness(model, TorchReferenceAttention(), block_size=4, ops=ops)
    assert_same_logits(harness.logits(PROMPT), checkpoint.expected(PROMPT))
    layers = len(model.attention_layers())
    assert (linear.gated, linear.added) == (gated * layers, added * 2 * layers)
