"""Quantization methods with one fault each: variants of the one-byte format of templates/quantization.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...contracts.quantization import LayerMethod, LayerSpec, QuantizationMethod, QuantizationProvider
from ..templates.quantization import MyQuantizationLayer, is_mine
from . import BrokenSample


class ZeroPointOffByOne(MyQuantizationLayer):
    """`apply` takes the zero point to be one more, as some formats store it."""

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        weight = self.dequantize() - self._tensors["scales"]
        product = x.float() @ weight.t()
        return (product if bias is None else product + bias).to(out_dtype or x.dtype)


class DropsTheBias(MyQuantizationLayer):
    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        return super().apply(x, None, out_dtype)


class MixesUpParts(MyQuantizationLayer):
    """Puts the parts of a fused layer in the order in which they come."""

    def __init__(self, spec: LayerSpec, device: str) -> None:
        super().__init__(spec, device)
        self._filled = dict.fromkeys(self._tensors, 0)

    def load(self, name: str, part: int, tensor: Tensor) -> None:
        super().load(name, part, tensor)
        start = self._filled[name]
        self._filled[name] += len(tensor)
        self._tensors[name][start : start + len(tensor)] = tensor


class KeepsViewsOfTheFile(MyQuantizationLayer):
    """Does not copy: the scales are those of a file that is closed by the time they are used."""

    def load(self, name: str, part: int, tensor: Tensor) -> None:
        super().load(name, part, tensor)
        if name == "scales" and len(self._spec.parts) == 1:
            self._tensors[name] = tensor


class ServesHalfALayer(MyQuantizationLayer):
    """Does not notice that tensors are missing."""

    def finish_loading(self) -> None:
        self._awaited.clear()


class AddsAndDeniesIt(MyQuantizationLayer):
    """The caller adds the product a second time."""

    def add_product(self, x: Tensor, residual: Tensor) -> bool:
        residual.add_(self.apply(x, None))
        return False


class GatesWithTheSecondHalf(MyQuantizationLayer):
    """Fuses the activation, with gate and up exchanged."""

    def apply_gated(self, x: Tensor, op: str) -> Tensor:
        up, gate = self.apply(x, None).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


class WrongDtype(MyQuantizationLayer):
    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        return super().apply(x, bias, out_dtype).float()


class _Method(QuantizationMethod):
    def __init__(self, layer: type[MyQuantizationLayer]) -> None:
        self._layer = layer

    def create(self, spec: LayerSpec) -> LayerMethod:
        return self._layer(spec, "cpu")


def is_any(hf_config: dict[str, Any]) -> bool:
    """Takes whatever says that it is quantized."""
    return bool(hf_config.get("quantization_config"))


def empties_the_config(hf_config: dict[str, Any]) -> bool:
    """Looks, and takes what it has looked at out of the config."""
    return bool(hf_config.pop("quantization_config", None) == "my_quantization")


def _sample(name: str, layer: type[MyQuantizationLayer], caught_by: str, detect: Any = is_mine) -> BrokenSample:
    provider = QuantizationProvider(
        name=name, build=lambda context: _Method(layer), detect=detect, summary=f"broken: {name}"
    )
    return BrokenSample(name, provider, caught_by)


BROKEN: tuple[BrokenSample, ...] = (
    _sample("zero_point_off_by_one", ZeroPointOffByOne, "apply_equals_the_dequantized_product"),
    _sample("drops_the_bias", DropsTheBias, "apply_adds_the_bias"),
    _sample("mixes_up_parts", MixesUpParts, "parts_may_come_in_any_order"),
    _sample("keeps_views_of_the_file", KeepsViewsOfTheFile, "apply_equals_the_dequantized_product"),
    _sample("serves_half_a_layer", ServesHalfALayer, "missing_tensors_are_noticed"),
    _sample("wrong_dtype", WrongDtype, "apply_gives_the_dtype_that_is_asked_for"),
    _sample("adds_and_denies_it", AddsAndDeniesIt, "fused_forms_equal_apply"),
    _sample("gates_with_the_second_half", GatesWithTheSecondHalf, "fused_forms_equal_apply"),
    _sample("takes_any_checkpoint", MyQuantizationLayer, "detect_knows_its_own", is_any),
    _sample("empties_the_config", MyQuantizationLayer, "detect_is_pure", empties_the_config),
)
