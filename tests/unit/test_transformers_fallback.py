"""Models of transformers without a native form: served exactly, or refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hotswap.core.contracts.attention import AttentionLayer
from hotswap.core.errors import ModelLoadError
from hotswap.core.testing.forward_harness import ForwardHarness, model_context, quantization_context, read_safetensors
from hotswap.core.testing.tiny_models import make_tiny_model
from hotswap.plugins.attention.torch_reference.backend import TorchReferenceAttention
from hotswap.plugins.models.transformers_fallback import examine as examine_module
from hotswap.plugins.models.transformers_fallback import hotswap_model
from hotswap.plugins.models.transformers_fallback import model as model_module
from hotswap.plugins.models.transformers_fallback.examine import pin_rope
from hotswap.plugins.models.transformers_fallback.model import TransformersModel
from hotswap.plugins.models.transformers_fallback.routing import RoutedLayer
from hotswap.plugins.quantization.none.method import PlainQuantization

PROMPT = torch.randint(4, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
MAX_LEN = 96
GENERATED = ("gpt-neox", "starcoder2", "opt")  # compared with `generate` too; the others by one forward

Folders = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose a lot where other tests run beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_tiny_model(tmp_path_factory.mktemp(name), name, tokenizer=False)
        return made[name]

    return get


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def build(
    folder: Path, config: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, max_model_len: int = MAX_LEN
) -> TransformersModel:
    quantization = PlainQuantization(quantization_context(dtype=dtype))
    settings = config_of(folder) if config is None else config
    return TransformersModel(
        model_context(settings, quantization, dtype=dtype, max_model_len=max_model_len, model_path=str(folder))
    )


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> TransformersModel:
    model = build(folder, dtype=dtype)
    model.load_weights(read_safetensors(folder))
    return model


def oracle_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(oracle: Any, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = oracle(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < 1e-5, f"relative error {error:.2e}"


@pytest.mark.parametrize(
    "name", ["gpt-neox", "starcoder2", "stablelm", "cohere", "opt", "gpt2", "mixtral", "exaone4", "deepseek-v3"]
)
def test_served_exactly(name: str, folder_of: Folders) -> None:
    """Rotary, learned and no positions; sliding windows; logit scales; experts; keys wider than values."""
    model = loaded(folder_of(name))
    assert not model.supports_graphs
    harness = ForwardHarness(model, TorchReferenceAttention(), block_size=4)
    oracle = oracle_of(folder_of(name))
    assert_same_logits(harness.logits(PROMPT), logits_of(oracle, PROMPT))
    assert_same_logits(harness.logits(PROMPT, chunk_size=7), logits_of(oracle, PROMPT))
    prompts = [PROMPT[:5], PROMPT[3:30], PROMPT[:1]]
    for prompt, output in zip(prompts, harness.generate(prompts, max_tokens=12, chunk_size=6), strict=True):
        assert output == logits_of(oracle, [*prompt, *output])[len(prompt) - 1 : -1].argmax(-1).tolist()
        if name in GENERATED:
            theirs = oracle.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            assert output == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bloom", "0 of its 3 layers attend through"),
        ("falcon", "it does not use transformers' attention interface"),
        ("mamba", "0 of its 3 layers attend through"),
        ("lfm2", "1 of its 3 layers attend through"),
        ("falcon-h1", "layers of type hybrid"),
        ("gpt-oss", "its attention needs 's_aux'"),
        ("llama4", "layers of type chunked_attention"),
        ("t5", "no decoder-only language model of type 't5'"),
    ],
)
def test_refused_before_any_weight_is_read(name: str, reason: str, folder_of: Folders) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        build(folder_of(name))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "no_such_thing"}, "knows no model type 'no_such_thing'"),
        ({"model_type": "theirs", "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "not run without --trust-remote-code"),
        ({"architectures": ["GPTNeoXForSequenceClassification"]}, "the one of 'gpt_neox' is GPTNeoXForCausalLM"),
        ({"hidden_size": "large"}, "config.json is not one of model type 'gpt_neox'"),
    ],
)
def test_configs_that_name_something_else(change: dict[str, Any], reason: str, folder_of: Folders) -> None:
    folder = folder_of("gpt-neox")
    with pytest.raises(ModelLoadError, match=reason):
        build(folder, {**config_of(folder), **change})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_check_finds_state_that_attention_does_not_carry(
    dtype: torch.dtype, folder_of: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """falcon-h1 has a state-space mixer beside attention in every layer. If nothing else had stopped it, this would."""
    monkeypatch.setattr(examine_module, "_LAYER_TYPES", {*examine_module._LAYER_TYPES, "hybrid"})
    model = build(folder_of("falcon-h1"), dtype=dtype)
    with pytest.raises(ModelLoadError, match="it mixes tokens by other means than attention"):
        model.load_weights(read_safetensors(folder_of("falcon-h1")))


def test_the_self_check_finds_attention_that_is_routed_wrongly(
    folder_of: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(RoutedLayer):
        def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: Any) -> Tensor:
            return super().__call__(module, query * 1.05, key, value, mask, kwargs)

    monkeypatch.setattr(model_module, "RoutedLayer", Wrong)
    with pytest.raises(ModelLoadError, match="its logits are off by"):
        loaded(folder_of("gpt-neox"))


def test_layers_that_slide_must_say_so(folder_of: Folders) -> None:
    config = transformers.AutoConfig.from_pretrained(folder_of("starcoder2"))
    layers = [AttentionLayer(index, 4, 2, 12, 12, 0.3) for index in range(3)]
    assert examine_module._layer_problems(config, layers, max_model_len=8) == []
    (problem,) = examine_module._layer_problems(config, layers, max_model_len=64)
    assert problem == "layers [0, 1, 2] have a sliding window that they do not pass to the attention function"


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope"])
def test_rotations_do_not_depend_on_the_batch(name: str, folder_of: Folders) -> None:
    """J09: transformers would change them with the longest position of a step."""
    harness = ForwardHarness(loaded(folder_of(name)), TorchReferenceAttention())
    oracle = oracle_of(folder_of(name))
    pin_rope(oracle, MAX_LEN)
    prompt = PROMPT[:20]
    outputs = harness.generate([prompt, PROMPT], max_tokens=24)
    for given, output in zip([prompt, PROMPT], outputs, strict=True):
        assert output == logits_of(oracle, [*given, *output])[len(given) - 1 : -1].argmax(-1).tolist()


def test_what_the_layers_ask_for(folder_of: Folders) -> None:
    model = build(folder_of("starcoder2"))
    assert [layer.window for layer in model.attention_layers()] == [8, 8, 8]
    assert [layer.window for layer in build(folder_of("starcoder2"), max_model_len=8).attention_layers()] == [None] * 3
    (spec,) = set(model.cache_specs())
    assert (spec.kind, spec.num_kv_heads, spec.head_dim_k, spec.dtype) == ("full", 2, 12, "float32")
    (latent,) = set(build(folder_of("deepseek-v3")).cache_specs())
    assert (latent.head_dim_k, latent.head_dim_v) == (16, 12)


def test_bfloat16_stays_close(folder_of: Folders) -> None:
    model = loaded(folder_of("gpt-neox"), torch.bfloat16)
    found = ForwardHarness(model, TorchReferenceAttention()).logits(PROMPT)
    expected = logits_of(oracle_of(folder_of("gpt-neox")), PROMPT)
    assert found.dtype == torch.float32
    assert (found - expected).norm() / expected.norm() < 0.05


def test_missing_and_unused_tensors(folder_of: Folders) -> None:
    folder = folder_of("gpt-neox")
    weights = dict(read_safetensors(folder))
    weights["gpt_neox.extra"] = torch.zeros(3)
    assert build(folder).load_weights(weights.items()).unexpected == ["gpt_neox.extra"]
    del weights["gpt_neox.layers.1.attention.dense.weight"]
    with pytest.raises(ModelLoadError, match=r"gpt_neox\.layers\.1\.attention\.dense\.weight"):
        build(folder).load_weights(weights.items())
    weights["gpt_neox.layers.1.attention.dense.weight"] = torch.zeros(5, 5)
    with pytest.raises(ModelLoadError, match=r"dense\.weight has the shape \[5, 5\]; the config asks for \[48, 48\]"):
        build(folder).load_weights(weights.items())
    with pytest.raises(ModelLoadError, match=r"gpt_neox\.extra twice"):
        build(folder).load_weights([("gpt_neox.extra", torch.zeros(1))] * 2)


def test_tied_heads(folder_of: Folders) -> None:
    """starcoder2 ties its head: the file has none, and the spec says that it may be absent."""
    model = build(folder_of("starcoder2"))
    optional = {spec.name for spec in model.weight_specs() if spec.optional}
    assert optional == {"lm_head.weight"}
    assert "lm_head.weight" not in dict(read_safetensors(folder_of("starcoder2")))


def test_nothing_of_the_loader_s_memory_is_kept(folder_of: Folders) -> None:
    folder = folder_of("gpt-neox")
    weights = dict(read_safetensors(folder))
    model = build(folder)
    model.load_weights(weights.items())
    harness = ForwardHarness(model, TorchReferenceAttention())
    before = harness.logits(PROMPT[:4])
    for tensor in weights.values():
        tensor.fill_(float("nan"))
    assert torch.equal(harness.logits(PROMPT[:4]), before)


def test_the_provider_is_the_fallback(folder_of: Folders) -> None:
    (provider,) = hotswap_model()
    context = model_context(config_of(folder_of("gpt-neox")), PlainQuantization(quantization_context()))
    assert provider.fallback
    assert provider.architectures == ()
    assert list(provider.unavailable(context)) == []
    model = provider.build(context)
    with pytest.raises(ModelLoadError, match="no other stage"):
        model.forward(torch.zeros(1, 48), torch.zeros(1), None, {})  # type: ignore[arg-type]
