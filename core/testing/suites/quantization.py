"""What every quantization method must hold: products equal those with its own dequantized weight.

from hotswap.core.testing.suites import QuantizationSuite

class TestMyQuantization(QuantizationSuite):
    plugin = "hotswap_my_quantization"
    hf_config = {"quantization_config": {"quant_method": "my_quantization"}}

    def make_part(self, spec, part, generator):  # optional: a format's own arithmetic, to check `dequantize` too
        ...
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ...contracts.loader import ModelLoadError
from ...contracts.provider import ModelInfo
from ...contracts.quantization import LayerMethod, LayerSpec, ParamSpec, QuantizationMethod, QuantizationProvider
from ...layers import reference
from ...layers.linear import part_shape
from ...layers.reference import ReferenceLinear
from .base import ConformanceSuite

# in_features and the output rows of each fused part.
SHAPES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (64, (64,)),
    (128, (64, 32, 32)),
    (256, (96, 96)),
    (576, (192, 64, 64)),
    (65, (33,)),
    (1, (1,)),
    (48, (48, 24, 24)),
)
_NOT_MINE: tuple[dict[str, Any], ...] = (
    {"quantization_config": {"quant_method": "no_such_method"}},
    {"quantization_config": {}},
    {"model_type": "llama"},
    {},
    {"quantization_config": None},
    {"quantization_config": "text"},
    {"quantization_config": {"quant_method": None}},
    {"quantization_config": {"quant_method": ["x"]}},
)


class QuantizationSuite(ConformanceSuite):
    """hf_config: a config.json that the method recognises. shapes: layers to try; those that it refuses are left out, but
    it must serve one. max_error: how far `dequantize` may be from what `make_part` says, relative to its largest."""

    kind: ClassVar[str] = "quantization"
    hf_config: ClassVar[Mapping[str, Any]] = {}
    shapes: ClassVar[tuple[tuple[int, tuple[int, ...]], ...]] = SHAPES
    max_error: ClassVar[float] = 1e-6

    # For authors.

    def make_part(
        self, spec: LayerSpec, part: int, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """The checkpoint tensors of one fused part by ParamSpec name, and the weight [rows, in_features] that they stand for.

        By default random numbers in the shapes and dtypes of `params()`, and None: only `apply` is then compared with
        `dequantize`, not `dequantize` with the format.
        """
        params = self.method().create(spec).params()
        return {param.name: self._random(param, spec.parts[part], generator) for param in params}, None

    # Building.

    def context_fields(self) -> dict[str, Any]:
        config = dict(self.hf_config)
        info = ModelInfo(config, "LlamaForCausalLM", "float32", 320, 320, 256) if config else None
        return {"linear": ReferenceLinear(), "torch_dtype": torch.float32, "model": info}

    def method(self, **fields: Any) -> QuantizationMethod:
        made: QuantizationMethod = self.build(**fields)
        return made

    def specs(self) -> list[LayerSpec]:
        """The layers out of `shapes` that it serves."""
        served, reasons = [], []
        method = self.method()
        for columns, parts in self.shapes:
            spec = LayerSpec("linear", "model.layers.0.layer", columns, sum(parts), parts)
            try:
                method.create(spec)
            except ModelLoadError as error:
                reasons.append(str(error))
            else:
                served.append(spec)
        if not served:
            pytest.fail(f"it serves none of the shapes: {'; '.join(reasons)}", pytrace=False)
        return served

    def loaded(self, spec: LayerSpec, seed: int = 0, **fields: Any) -> tuple[LayerMethod, Tensor | None]:
        """A layer filled from `make_part`, and the weight that it stands for, where that is known."""
        layer = self.method(**fields).create(spec)
        generator = torch.Generator().manual_seed(seed)
        weights = []
        for part in range(len(spec.parts)):
            tensors, weight = self.make_part(spec, part, generator)
            for name, tensor in tensors.items():
                layer.load(name, part, tensor)
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))  # a view of a mapped file that is gone by now
            weights.append(weight)
        layer.finish_loading()
        known = [weight for weight in weights if weight is not None]
        return layer, torch.cat(known) if len(known) == len(weights) else None

    def _random(self, param: ParamSpec, rows: int, generator: torch.Generator) -> Tensor:
        shape, dtype = part_shape(param, rows), getattr(torch, param.dtype)
        if dtype.is_floating_point:
            positive = param.name != "weight"  # scales
            numbers = (
                torch.rand(shape, generator=generator) + 0.1 if positive else torch.randn(shape, generator=generator)
            )
            return numbers.to(dtype)
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, shape, generator=generator, dtype=dtype)

    # The tests.

    def test_detect_is_pure(self, provider: QuantizationProvider) -> None:
        """`detect` looks at the config and nothing else: the same answer each time, the config unchanged, and no error
        whatever the config holds."""
        for config in copy.deepcopy([*_NOT_MINE, dict(self.hf_config)]):  # a faulty one may change what it gets
            before = repr(config)
            answers = [provider.detect(config) for _ in range(2)]
            assert answers[0] is answers[1] and isinstance(answers[0], bool), f"{config}: {answers}"
            assert repr(config) == before, "it changed the config"

    def test_detect_knows_its_own(self, provider: QuantizationProvider) -> None:
        """It recognises its own checkpoints, and leaves another method's alone."""
        assert not provider.detect(copy.deepcopy(_NOT_MINE[0])), "it takes checkpoints of any method"
        if not self.hf_config:
            pytest.skip("no hf_config is given")
        assert provider.detect(dict(self.hf_config)), f"it does not recognise {dict(self.hf_config)}"

    def test_params_are_in_fused_form(self) -> None:
        """`params` says the fused shapes before anything is loaded, and each part has a share of its rows."""
        for spec in self.specs():
            params = self.method().create(spec).params()
            assert params, "it wants no tensor at all"
            assert len({param.name for param in params}) == len(params), "two params of one name"
            for param in params:
                assert hasattr(torch, param.dtype), f"{param.name}: no dtype {param.dtype!r}"
                if param.shape:
                    rows = sum(part_shape(param, rows)[param.part_dim] for rows in spec.parts)
                    assert rows == param.shape[param.part_dim], f"{param.name}: its parts have {rows} rows in all"

    def test_apply_equals_the_dequantized_product(self) -> None:
        """`apply` is x times `dequantize()` transposed, for one row or many, of any shape that it serves."""
        for seed, spec in enumerate(self.specs()):
            layer, _ = self.loaded(spec, seed)
            weight = layer.dequantize()
            assert weight.shape == (spec.out_features, spec.in_features)
            for rows in (1, 2, 17):
                x = normal(rows, spec.in_features, seed=rows)
                before = x.clone()
                compare(layer.apply(x, None), x, weight, None, torch.float32, spec)
                assert torch.equal(x, before), "it changed x"

    def test_apply_adds_the_bias(self) -> None:
        """The bias is added, in full precision, and is not quantized."""
        for spec in self.specs():
            layer, _ = self.loaded(spec)
            x, bias = normal(3, spec.in_features), normal(spec.out_features, seed=1)
            compare(layer.apply(x, bias), x, layer.dequantize(), bias, torch.float32, spec)

    def test_apply_gives_the_dtype_that_is_asked_for(self) -> None:
        """The result is in out_dtype, by default that of x."""
        spec = self.specs()[0]
        layer, _ = self.loaded(spec)
        for given in (torch.float32, torch.bfloat16):
            for asked in (None, torch.float32, torch.bfloat16):
                x = normal(3, spec.in_features).to(given)
                out = layer.apply(x, None, asked)
                assert out.dtype == (asked or given), f"{out.dtype} instead of {asked or given}"
                coarsest = torch.bfloat16 if torch.bfloat16 in (given, out.dtype) else torch.float32
                compare(out, x, layer.dequantize(), None, coarsest, spec)

    def test_fused_forms_equal_apply(self) -> None:
        """Where the method fuses what stands behind a product, apply_gated is the op of what apply gives and add_product the
        sum with it; where it does not, nothing has changed."""
        for seed, spec in enumerate(self.specs()):
            layer, _ = self.loaded(spec, seed)
            x, residual = normal(3, spec.in_features), normal(3, spec.out_features, seed=1)
            before, product = residual.clone(), layer.apply(x, None)
            size = float(product.abs().max()) + 1e-3
            for op in ("silu_mul", "gelu_tanh_mul") if spec.out_features % 2 == 0 else ():
                gated = layer.apply_gated(x, op)
                if gated is not None:
                    torch.testing.assert_close(gated, getattr(reference, op)(product), rtol=1e-4, atol=1e-5 * size**2)
            if layer.add_product(x, residual):
                torch.testing.assert_close(residual, before + product, rtol=1e-4, atol=1e-5 * size)
            else:
                assert torch.equal(residual, before), "add_product said no and changed the residual"

    def test_dequantize_equals_the_format(self) -> None:
        """`dequantize` gives the weight that the checkpoint's tensors stand for."""
        compared = False
        for seed, spec in enumerate(self.specs()):
            layer, weight = self.loaded(spec, seed)
            if weight is not None:
                error = (layer.dequantize().double() - weight.double()).abs().max()
                assert error <= self.max_error * weight.abs().max(), (
                    f"{spec.parts} x {spec.in_features}: off by {error}"
                )
                compared = True
        if not compared:
            pytest.skip("make_part does not say what its tensors stand for")

    def test_parts_may_come_in_any_order(self) -> None:
        """A fused layer's parts land in their own rows, in whatever order the file has them."""
        for spec in self.specs():
            if len(spec.parts) == 1:
                continue
            forward, _ = self.loaded(spec)
            backward = self.method().create(spec)
            generator = torch.Generator().manual_seed(0)
            made = [self.make_part(spec, part, generator)[0] for part in range(len(spec.parts))]
            for part in reversed(range(len(spec.parts))):
                for name in reversed(made[part]):
                    backward.load(name, part, made[part][name])
            backward.finish_loading()
            assert torch.equal(forward.dequantize(), backward.dequantize())
            for part in range(len(spec.parts)):  # each part alone is a layer, too
                rows = spec.parts[part]
                one = self.method().create(LayerSpec("linear", "model.layers.0.part", spec.in_features, rows, (rows,)))
                for name, tensor in made[part].items():
                    one.load(name, 0, tensor)
                one.finish_loading()
                start = sum(spec.parts[:part])
                assert torch.equal(one.dequantize(), forward.dequantize()[start : start + rows]), f"part {part}"

    def test_wrong_tensors_are_refused(self) -> None:
        """A tensor of a wrong shape, of an unknown name or of a part that is not there is a ModelLoadError."""
        spec = max(self.specs(), key=lambda spec: len(spec.parts))
        tensors, _ = self.make_part(spec, 0, torch.Generator().manual_seed(0))
        for name, tensor in tensors.items():
            if tensor.ndim:
                wrong = torch.cat((tensor, tensor), dim=0)
                with pytest.raises(ModelLoadError):
                    self.method().create(spec).load(name, 0, wrong)
            with pytest.raises(ModelLoadError):
                self.method().create(spec).load(name, len(spec.parts), tensor)
            with pytest.raises(ModelLoadError):
                self.method().create(spec).load("no_such_tensor", 0, tensor)

    def test_missing_tensors_are_noticed(self) -> None:
        """`finish_loading` without one of the tensors is a ModelLoadError, not a layer of whatever was in memory."""
        spec = max(self.specs(), key=lambda spec: len(spec.parts))
        generator = torch.Generator().manual_seed(0)
        made = [self.make_part(spec, part, generator)[0] for part in range(len(spec.parts))]
        for absent in [(part, name) for part, tensors in enumerate(made) for name in tensors]:
            layer = self.method().create(spec)
            for part, tensors in enumerate(made):
                for name, tensor in tensors.items():
                    if (part, name) != absent:
                        layer.load(name, part, tensor)
            with pytest.raises(ModelLoadError):
                layer.finish_loading()

    def test_unknown_kinds_of_layer_are_refused(self) -> None:
        """A layer of a kind that it does not serve is a ModelLoadError."""
        kinds: tuple[Literal["experts", "embedding", "kv"], ...] = ("experts", "embedding", "kv")
        for kind in kinds:
            spec = LayerSpec(kind, "model.layers.0.other", 64, 64, (64,))
            with contextlib.suppress(ModelLoadError):
                self.method().create(spec)

    def test_layers_do_not_share_state(self) -> None:
        """Two layers of one method keep to their own weights."""
        spec = self.specs()[0]
        method = self.method()
        layers = [method.create(spec), method.create(spec)]
        for seed, layer in enumerate(layers):
            for name, tensor in self.make_part(spec, 0, torch.Generator().manual_seed(seed))[0].items():
                layer.load(name, 0, tensor)
        for layer in layers:
            layer.finish_loading()
        alone, _ = self.loaded(spec, seed=0)
        assert torch.equal(layers[0].dequantize(), alone.dequantize())
        assert not torch.equal(layers[1].dequantize(), alone.dequantize())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, spec: LayerSpec) -> None:
    """Relative to the sum of the magnitudes: what float32 arithmetic, and one rounding of each operand to dtype, allow."""
    terms = [x, weight] + ([] if bias is None else [bias])
    exact = F.linear(*(term.double() for term in terms))
    size = F.linear(*(term.double().abs() for term in terms))
    relative = 2e-6 * max(1.0, math.sqrt(spec.in_features) / 4) if dtype == torch.float32 else 2.0**-7
    worst = ((found.double() - exact).abs() / (size * relative + 1e-30)).nan_to_num(math.inf).max()
    assert worst <= 1, f"{spec.parts} x {spec.in_features}: {float(worst):.1f} times the error that rounding explains"
