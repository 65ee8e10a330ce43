"""What every model family must hold: the logits of transformers' own code, however the tokens are cut into steps.

from hotswap.core.testing.suites import ModelSuite

class TestMyModel(ModelSuite):
    plugin = "hotswap_my_model"
    tiny_models = ("llama", "llama-tied")     # optional: names of hotswap.core.testing.tiny_models.TINY_MODELS

    def make_checkpoint(self, folder):        # instead, for a family that is not among those
        ...
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...contracts.attention import AttentionLayer
from ...contracts.kernels import LinearKernel, PackedWeight
from ...contracts.loader import ModelLoadError
from ...contracts.model import Model, ModelContext, ModelProvider
from ...contracts.provider import BuildContext
from ...contracts.quantization import LayerMethod, LayerSpec, ParamSpec, QuantizationMethod
from ...layers.ops import OpTable
from ..forward_harness import ForwardHarness, model_context, read_safetensors
from ..oracle import transformers_model
from ..templates.attention import MyAttention
from ..tiny_models import TINY_MODELS, make_tiny_model
from .base import ConformanceSuite

MAX_LEN = 96
PROMPT: list[int] = torch.randint(4, 300, (44,), generator=torch.Generator().manual_seed(1)).tolist()
TOLERANCE = 1e-5  # of the largest logit, in float32


@dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint on disk, and transformers' model of it."""

    folder: Path
    config: dict[str, Any]
    oracle: Any

    def weights(self) -> dict[str, Tensor]:
        return dict(read_safetensors(self.folder))

    def expected(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [T, V]."""
        with torch.inference_mode():
            logits: Tensor = self.oracle(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits.float()


class ModelSuite(ConformanceSuite):
    """tiny_models: the checkpoints that are tried, by name; empty means the first that has an architecture of the
    provider's. A suite that overrides `make_checkpoint` needs none. names_differ: the model's tensors have other names than
    the checkpoint's, and are mapped at loading; those names are then not compared. max_tensors: how many are left out,
    changed or misshapen one by one."""

    kind: ClassVar[str] = "model"
    tiny_models: ClassVar[tuple[str, ...]] = ()
    names_differ: ClassVar[bool] = False
    max_tensors: ClassVar[int] = 16
    _made: ClassVar[dict[str, TinyCheckpoint]]

    # For authors.

    def make_checkpoint(self, folder: Path) -> Path:
        """Writes a small checkpoint that transformers can read, too, and returns its folder. For a family of your own:
        `make_tiny_model` of hotswap.core.testing.tiny_models shows how. Each tensor should be random.
        """
        return make_tiny_model(folder, self._names()[0], tokenizer=False)

    def oracle(self, folder: Path) -> Any:
        """transformers' model of the checkpoint; anything with its call signature will do."""
        return transformers_model(folder)

    # Building.

    def _names(self) -> tuple[str, ...]:
        if self.tiny_models:
            return self.tiny_models
        architectures = cast(ModelProvider, self.registered().provider).architectures
        for name in TINY_MODELS:
            if _architecture(name) in architectures:
                return (name,)
        pytest.fail(
            f"no tiny model has one of its architectures ({', '.join(architectures) or 'it names none'}): "
            "set `tiny_models`, or write `make_checkpoint`",
            pytrace=False,
        )

    @pytest.fixture(scope="class", autouse=True)
    def _checkpoints(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """A folder and memory for the checkpoints of one class."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tiny products gain nothing from threads
        with tempfile.TemporaryDirectory(prefix="hotswap-model-") as folder:
            request.cls._folder, request.cls._made = Path(folder), {}
            yield
            request.cls._made = {}
        torch.set_num_threads(threads)

    _folder: ClassVar[Path]

    def checkpoint(self, name: str = "") -> TinyCheckpoint:
        """The one called so, made once; "" is the first."""
        if type(self).make_checkpoint is ModelSuite.make_checkpoint and type(self).oracle is ModelSuite.oracle:
            return _shared_checkpoint(name or self._names()[0])
        if name not in self._made:
            target = self._folder / (name or "first")
            folder = make_tiny_model(target, name, tokenizer=False) if name else self.make_checkpoint(target)
            self._made[name] = TinyCheckpoint(folder, _config_of(folder), self.oracle(folder))
        return self._made[name]

    def checkpoints(self) -> list[TinyCheckpoint]:
        return [self.checkpoint(), *(self.checkpoint(name) for name in self.tiny_models[1:])]

    def context_fields(self) -> dict[str, Any]:
        return self._fields(self.checkpoint())

    def _fields(self, made: TinyCheckpoint, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
        ops = OpTable.reference()
        context: ModelContext = model_context(
            dict(made.config),
            PlainForTests(ops.linear, dtype),
            ops=ops,
            dtype=dtype,
            max_model_len=MAX_LEN,
            model_path=str(made.folder),
        )
        own = {one.name for one in dataclasses.fields(ModelContext)} - {
            one.name for one in dataclasses.fields(BuildContext)
        }
        return {**{name: getattr(context, name) for name in own}, **changes}

    def model(self, made: TinyCheckpoint, **changes: Any) -> Model:
        built: Model = self.build(**self._fields(made, **changes))
        return built

    def loaded(self, made: TinyCheckpoint, weights: dict[str, Tensor] | None = None, **changes: Any) -> Model:
        model = self.model(made, **changes)
        model.load_weights((made.weights() if weights is None else weights).items())
        return model

    def harness(self, made: TinyCheckpoint, **changes: Any) -> ForwardHarness:
        return ForwardHarness(self.loaded(made, **changes), MyAttention(), block_size=4)

    # The tests.

    def test_whole_prompt_equals_transformers(self) -> None:
        """The logits of every position of a prompt computed in one step are those of transformers' own code."""
        for made in self.checkpoints():
            same(self.harness(made).logits(PROMPT), made.expected(PROMPT))

    @pytest.mark.parametrize("chunk", [1, 7, 16])
    def test_chunked_prompt_equals_transformers(self, chunk: int) -> None:
        """So they are when the prompt is computed in chunks, or token by token as in decoding."""
        for made in self.checkpoints():
            model = self.loaded(made)
            if not model.chunkable:
                pytest.skip("it says that a prompt must be computed in one step")
            harness = ForwardHarness(model, MyAttention(), block_size=4)
            same(harness.logits(PROMPT, chunk_size=chunk), made.expected(PROMPT))

    def test_mixed_batches_continue_as_transformers_would(self) -> None:
        """Prompts of several lengths, prefilled in chunks beside each other's decodes: every token is the one that
        transformers would have chosen."""
        prompts = [PROMPT[:5], PROMPT[3:33], PROMPT[:1], PROMPT[10:27]]
        for made in self.checkpoints():
            model = self.loaded(made)
            harness = ForwardHarness(model, MyAttention(), block_size=4)
            outputs = harness.generate(prompts, max_tokens=12, chunk_size=6 if model.chunkable else None)
            for prompt, output in zip(prompts, outputs, strict=True):
                expected = made.expected([*prompt, *output])[len(prompt) - 1 : -1]
                for at, token in enumerate(output):
                    gap = expected[at].max() - expected[at, token]
                    assert gap <= 1e-4 * expected[at].abs().max(), f"prompt of {len(prompt)}, token {at}: not the best"

    def test_logits_are_float32_and_as_wide_as_the_oracle(self) -> None:
        """`logits` gives float32 [S, V] for any chosen rows, V the width of the output head."""
        for made in self.checkpoints():
            width = made.expected(PROMPT[:1]).shape[1]
            for dtype in (torch.float32, torch.bfloat16):
                found = self.harness(made, dtype=dtype).logits(PROMPT[:6])
                assert found.dtype == torch.float32 and found.shape == (6, width)

    def test_bfloat16_stays_close(self) -> None:
        """In bfloat16 the logits differ by rounding only."""
        for made in self.checkpoints():
            found, expected = self.harness(made, dtype=torch.bfloat16).logits(PROMPT), made.expected(PROMPT)
            assert (found - expected).norm() <= 0.08 * expected.norm()

    def test_cache_specs_agree_with_the_layers(self) -> None:
        """One cache spec for each attention layer, in its own sizes, in the dtype of the model; the same each time."""
        for made in self.checkpoints():
            for dtype in (torch.float32, torch.bfloat16):
                model = self.model(made, dtype=dtype)
                specs, layers = list(model.cache_specs()), list(model.attention_layers())
                assert specs and specs == list(model.cache_specs())
                assert {spec.dtype for spec in specs} == {str(dtype).removeprefix("torch.")}
                if layers:
                    assert [layer.index for layer in layers] == list(range(len(specs)))
                    for spec, layer in zip(specs, layers, strict=True):
                        sizes = layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v
                        assert (spec.num_kv_heads, spec.head_dim_k, spec.head_dim_v) == sizes

    def test_attention_is_asked_for_in_layer_order(self) -> None:
        """A forward asks each layer once, in order, as `attention_layers` says, with heads of the stated shapes."""
        made = self.checkpoint()
        model = self.loaded(made)
        asked: list[AttentionLayer] = []

        class Recorder:
            def attend(
                self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, *rotation: Tensor | None
            ) -> Tensor:
                asked.append(layer)
                assert query.shape == (6, layer.num_heads, layer.head_dim_k)
                assert key.shape == (6, layer.num_kv_heads, layer.head_dim_k)
                assert value.shape == (6, layer.num_kv_heads, layer.head_dim_v)
                return query.new_zeros(6, layer.num_heads, layer.head_dim_v)

        with torch.inference_mode():
            embeds = model.embed(torch.tensor(PROMPT[:6]))
            before = embeds.clone()
            hidden = model.forward(embeds, torch.arange(6), Recorder())
        assert hidden.shape == embeds.shape
        assert torch.equal(embeds, before), "forward changed its embeds"
        assert [layer.index for layer in asked] == list(range(len(model.cache_specs())))
        if model.attention_layers():
            assert asked == list(model.attention_layers())

    def test_what_may_be_recorded_looks_at_no_value(self) -> None:
        """A model that supports graphs asks for nothing that depends on values: one step is recorded and replayed for others.
        On a device, to look at a value is also to wait for it."""
        model = self.loaded(self.checkpoint())
        if not model.supports_graphs:
            pytest.skip("it says that it cannot be recorded")

        class Nothing:
            def attend(
                self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, *rotation: Tensor | None
            ) -> Tensor:
                return query.new_zeros(len(query), layer.num_heads, layer.head_dim_v)

        with torch.no_grad(), _ShapesOnly():  # type: ignore[no-untyped-call]
            hidden = model.forward(model.embed(torch.tensor(PROMPT[:6])), torch.arange(6), Nothing())
            model.logits(hidden)

    def test_weight_specs_are_what_the_checkpoint_holds(self) -> None:
        """`weight_specs` lists every tensor of the checkpoint in its name and shape; what is not there is optional."""
        if self.names_differ:
            pytest.skip("its tensors have other names than the checkpoint's")
        for made in self.checkpoints():
            specs = {spec.name: spec for spec in self.model(made).weight_specs()}
            stored = {name: tuple(tensor.shape) for name, tensor in made.weights().items()}
            assert not set(stored) - set(specs), f"never mentioned: {sorted(set(stored) - set(specs))}"
            assert {name: specs[name].shape for name in stored} == stored
            absent = [name for name in specs if name not in stored and not specs[name].optional]
            assert not absent, f"not in the checkpoint and not optional: {absent}"

    def test_made_up_weights_of_its_specs_load(self) -> None:
        """Tensors made after `weight_specs`, without the redundant ones, are a whole checkpoint: dummy weights are so."""
        for made in self.checkpoints():
            model = self.model(made)
            specs = [spec for spec in model.weight_specs() if not spec.redundant]
            generator = torch.Generator().manual_seed(0)
            weights = [(spec.name, 0.02 * torch.randn(spec.shape, generator=generator)) for spec in specs]
            report = model.load_weights(weights)
            assert (report.missing, report.unexpected) == ([], [])
            logits = ForwardHarness(model, MyAttention(), block_size=4).logits(PROMPT[:5])
            assert logits.isfinite().all()

    def test_every_tensor_is_used(self) -> None:
        """`load_weights` takes every tensor, in any order; each one matters to the result."""
        made = self.checkpoint()
        report = self.model(made).load_weights(reversed(made.weights().items()))
        assert (report.missing, report.unexpected) == ([], [])
        expected = self.harness(made).logits(PROMPT[:12])
        for name in self._one_of_each(made):
            weights = made.weights()
            weights[name] = weights[name].roll(1, 0) * 1.5 + 0.1
            changed = ForwardHarness(self.loaded(made, weights), MyAttention(), block_size=4).logits(PROMPT[:12])
            assert not torch.equal(changed, expected), f"{name} changes nothing"

    def _one_of_each(self, made: TinyCheckpoint, count: int = 0) -> list[str]:
        """Tensors outside the layers, and of the second layer; so many, evenly spread over them."""
        names = [name for name in made.weights() if ".0." not in name and ".2." not in name]
        count = min(count or self.max_tensors, len(names))
        return [names[index * len(names) // count] for index in range(count)]

    def test_missing_and_unknown_tensors_are_noticed(self) -> None:
        """A tensor that is missing, of a wrong shape or there twice is a ModelLoadError that names it; one too many is
        reported."""
        made = self.checkpoint()
        optional = {spec.name for spec in self.model(made).weight_specs() if spec.optional}
        required = [name for name in self._one_of_each(made, min(5, self.max_tensors)) if name not in optional]
        if self.names_differ:
            known = {spec.name for spec in self.model(made).weight_specs()}
            required = [name for name in required if name in known]
        for name in required:
            weights = made.weights()
            tensor = weights.pop(name)
            with pytest.raises(ModelLoadError) as missing:
                self.model(made).load_weights(weights.items())
            assert name in str(missing.value), f"the message does not name {name}: {missing.value}"
            with pytest.raises(ModelLoadError) as misshapen:
                self.model(made).load_weights({**weights, name: torch.cat((tensor, tensor))}.items())
            assert name in str(misshapen.value), f"the message does not name {name}: {misshapen.value}"
        weights = {**made.weights(), "something.else.weight": torch.zeros(3)}
        assert self.model(made).load_weights(weights.items()).unexpected == ["something.else.weight"]
        with pytest.raises(ModelLoadError):
            self.model(made).load_weights([*made.weights().items(), *list(made.weights().items())[:1]])

    def test_nothing_of_the_loaders_memory_is_kept(self) -> None:
        """Tensors may be views of a mapped file, which is gone later: what is kept was copied."""
        made = self.checkpoint()
        weights = made.weights()
        harness = ForwardHarness(self.loaded(made, weights), MyAttention(), block_size=4)
        before = harness.logits(PROMPT[:4])
        for tensor in weights.values():
            tensor.fill_(float("nan"))
        assert torch.equal(harness.logits(PROMPT[:4]), before)

    def test_config_is_left_as_it_is(self) -> None:
        """Building changes nothing in the config, which others read, too."""
        made = self.checkpoint()
        config = json.loads(json.dumps(made.config))
        self.build(**self._fields(made, hf_config=config))
        assert config == made.config

    def test_quantization_gets_every_linear_layer(self) -> None:
        """The large matrices go through the chosen quantization method, with the prefix and parts of the checkpoint."""
        made = self.checkpoint()
        fields = self._fields(made)
        model: Model = self.build(**fields)
        specs: list[LayerSpec] = fields["quantization"].specs
        if not specs:
            pytest.skip("it keeps its weights itself: it cannot be quantized")
        names = {spec.name for spec in model.weight_specs()}
        for spec in specs:
            assert sum(spec.parts) == spec.out_features, f"{spec.prefix}: its parts have other rows than itself"
            parent, _, last = spec.prefix.rpartition(".")
            parts = model.packed_modules.get(last, (last,)) if len(spec.parts) > 1 else (last,)
            for part in parts:
                stem = f"{parent}.{part}" if parent else part
                assert f"{stem}.weight" in names, f"{spec.prefix}: the checkpoint has no {stem}.weight"


class _ShapesOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises AssertionError on operations whose result on the host, or whose shape, depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_integers = func is torch.ops.aten.index.Tensor and not any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if not by_integers and {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            raise AssertionError(f"{func} depends on values: either avoid it, or say `supports_graphs = False`")
        return func(*args, **(kwargs or {}))


class PlainForTests(QuantizationMethod):
    """Plain weights, whichever shape; remembers what it was asked for. The plugins' own `none` may not be imported here."""

    def __init__(self, linear: LinearKernel, dtype: torch.dtype) -> None:
        self._linear, self._dtype = linear, dtype
        self.specs: list[LayerSpec] = []

    def create(self, spec: LayerSpec) -> LayerMethod:
        self.specs.append(spec)
        return _PlainLayer(spec, self._linear, self._dtype)


class _PlainLayer(LayerMethod):
    def __init__(self, spec: LayerSpec, linear: LinearKernel, dtype: torch.dtype) -> None:
        self._linear = linear
        self._parts = spec.parts
        self._weight = torch.full((spec.out_features, spec.in_features), float("nan"), dtype=dtype)
        self._packed: PackedWeight | None = None

    def params(self) -> tuple[ParamSpec, ...]:
        return (ParamSpec("weight", tuple(self._weight.shape), str(self._weight.dtype).removeprefix("torch.")),)

    def load(self, name: str, part: int, tensor: Tensor) -> None:
        rows = self._weight.split_with_sizes(self._parts)[part]
        if tensor.shape != rows.shape:
            raise ModelLoadError(f"{name}, part {part}, has the shape {list(tensor.shape)}, not {list(rows.shape)}")
        rows.copy_(tensor)

    def finish_loading(self) -> None:
        self._packed = self._linear.pack(self._weight)

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        return self._linear.apply(x, self._packed, bias, out_dtype)  # type: ignore[arg-type]  # set by finish_loading

    def dequantize(self) -> Tensor:
        return self._weight


@functools.cache
def _shared_checkpoint(name: str) -> TinyCheckpoint:
    """A tiny model, made once a process: many classes, and every broken sample, are tried on the same one."""
    parent = Path(tempfile.mkdtemp(prefix="hotswap-tiny-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = make_tiny_model(parent / name, name, tokenizer=False)
    return TinyCheckpoint(folder, _config_of(folder), transformers_model(folder))


def _config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def _architecture(name: str) -> str:
    """The architecture that the tiny model's config.json names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(TINY_MODELS[name].model_type, "")
    return found


def same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape, f"{list(found.shape)} instead of {list(expected.shape)}"
    error = ((found - expected).abs().max() / expected.abs().max()).nan_to_num(float("inf"))
    assert error < TOLERANCE, f"relative error {float(error):.1e}"
