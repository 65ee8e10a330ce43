"""The built-in quantization method, and the example of the docs, pass the conformance suite."""

from __future__ import annotations

import torch
from torch import Tensor

from hotswap.core.contracts import LayerSpec
from hotswap.core.testing.suites import QuantizationSuite


class TestNone(QuantizationSuite):
    plugin = "hotswap.plugins.quantization.none"
    hf_config = {"model_type": "llama"}

    def make_part(self, spec: LayerSpec, part: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        weight = torch.randn(spec.parts[part], spec.in_features, generator=generator)
        return {"weight": weight.clone()}, weight


class TestExample(QuantizationSuite):
    """With the format's own arithmetic: a row's bytes, its scale and its zero point, from a random weight."""

    plugin = "hotswap.core.testing.templates.quantization"
    hf_config = {"quantization_config": {"quant_method": "my_quantization"}}
    max_error = 0.01

    def make_part(self, spec: LayerSpec, part: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        weight = torch.randn(spec.parts[part], spec.in_features, generator=generator)
        low, high = weight.amin(1, keepdim=True).clamp(max=0), weight.amax(1, keepdim=True).clamp(min=0)
        scales = (high - low) / 255
        zeros = (-low / scales).round()
        qweight = (weight / scales + zeros).round().clamp(0, 255)
        return {"qweight": qweight.byte(), "scales": scales, "zeros": zeros.byte()}, weight
