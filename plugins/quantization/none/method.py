"""The layer method of `none`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hotswap.core.contracts.kernels import PackedWeight
from hotswap.core.contracts.loader import ModelLoadError
from hotswap.core.contracts.quantization import (
    LayerMethod,
    LayerSpec,
    ParamSpec,
    QuantizationContext,
    QuantizationMethod,
)
from hotswap.core.layers.weights import check_float

if TYPE_CHECKING:
    from torch import Tensor


class PlainQuantization(QuantizationMethod):
    """Creates plain layers for one kernel, dtype and device."""

    def __init__(self, context: QuantizationContext) -> None:
        if context.torch_dtype is None:
            raise ModelLoadError("quantization none: no dtype was given for the weights")
        self._context = context

    def create(self, spec: LayerSpec) -> LayerMethod:
        if spec.kind != "linear":
            raise ModelLoadError(f"{spec.prefix}: quantization none does not serve layers of kind {spec.kind!r}")
        return PlainLinear(spec, self._context)


class PlainLinear(LayerMethod):
    """One fused matrix. It is allocated when its first part comes and dropped when the kernel has packed it, so that
    a load never holds the plain form of more than the layers that are still being filled."""

    def __init__(self, spec: LayerSpec, context: QuantizationContext) -> None:
        self._spec = spec
        self._linear = context.linear
        self._dtype: torch.dtype = context.torch_dtype
        self._device = context.torch_device
        self._plain: Tensor | None = None
        self._packed: PackedWeight | None = None
        self._loaded: set[int] = set()

    def params(self) -> tuple[ParamSpec, ...]:
        dtype = str(self._dtype).removeprefix("torch.")
        return (ParamSpec("weight", (self._spec.out_features, self._spec.in_features), dtype),)

    def load(self, name: str, part: int, tensor: Tensor) -> None:
        spec = self._spec
        if name != "weight" or not 0 <= part < len(spec.parts):
            raise ModelLoadError(
                f"{spec.prefix}: a plain layer of {len(spec.parts)} part(s) has no {name!r} of part {part}"
            )
        if part in self._loaded:
            raise ModelLoadError(f"{spec.prefix}.weight: part {part} came twice")
        check_float(f"{spec.prefix}.weight", tensor)
        wanted = (spec.parts[part], spec.in_features)
        if tuple(tensor.shape) != wanted:
            raise ModelLoadError(
                f"{spec.prefix}.weight, part {part}, has the shape {list(tensor.shape)}; {list(wanted)} is needed"
            )
        if self._plain is None:
            self._plain = torch.empty(spec.out_features, spec.in_features, dtype=self._dtype, device=self._device)
        start = sum(spec.parts[:part])
        self._plain[start : start + spec.parts[part]].copy_(tensor)
        self._loaded.add(part)

    def finish_loading(self) -> None:
        if self._plain is None or len(self._loaded) != len(self._spec.parts):
            absent = sorted(set(range(len(self._spec.parts))) - self._loaded)
            raise ModelLoadError(f"{self._spec.prefix}.weight: part(s) {absent} never came")
        self._packed = self._linear.pack(self._plain)
        self._plain = None

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        return self._linear.apply(x, self._packed, bias, out_dtype)  # type: ignore[arg-type]  # set by finish_loading

    def apply_gated(self, x: Tensor, op: str) -> Tensor | None:
        return self._linear.apply_gated(x, self._packed, op)  # type: ignore[arg-type]

    def add_product(self, x: Tensor, residual: Tensor) -> bool:
        return self._linear.add_product(x, self._packed, residual)  # type: ignore[arg-type]

    def dequantize(self) -> Tensor:
        if self._packed is None:
            raise ModelLoadError(f"{self._spec.prefix}: its weights are not loaded")
        return self._packed.unpack()
