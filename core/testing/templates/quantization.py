"""Quantization `my_quantization`: one byte a weight, with a scale and a zero point for each output row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hotswap.core.contracts import (
    LayerMethod,
    LayerSpec,
    ModelLoadError,
    ParamSpec,
    QuantizationContext,
    QuantizationMethod,
    QuantizationProvider,
    hookimpl,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class MyQuantization(QuantizationMethod):
    def __init__(self, device: str) -> None:
        self._device = device

    def create(self, spec: LayerSpec) -> LayerMethod:
        if spec.kind != "linear":
            raise ModelLoadError(f"{spec.prefix}: my_quantization does not serve layers of kind {spec.kind!r}")
        return MyQuantizationLayer(spec, self._device)


class MyQuantizationLayer(LayerMethod):
    def __init__(self, spec: LayerSpec, device: str) -> None:
        import torch  # here: the process that reads the hooks has no use for it

        self._spec = spec
        self._tensors = {
            param.name: torch.empty(param.shape, dtype=getattr(torch, param.dtype), device=device)
            for param in self.params()
        }
        self._awaited = {(name, part) for name in self._tensors for part in range(len(spec.parts))}

    def params(self) -> tuple[ParamSpec, ...]:
        rows, columns = self._spec.out_features, self._spec.in_features
        return (
            ParamSpec("qweight", (rows, columns), "uint8"),
            ParamSpec("scales", (rows, 1), "float32"),
            ParamSpec("zeros", (rows, 1), "uint8"),
        )

    def load(self, name: str, part: int, tensor: Tensor) -> None:
        where = f"{self._spec.prefix}.{name}, part {part}"
        if (name, part) not in self._awaited:
            raise ModelLoadError(f"{where}: not a tensor of this layer, or it came twice")
        start = sum(self._spec.parts[:part])
        target = self._tensors[name][start : start + self._spec.parts[part]]
        if (tensor.shape, tensor.dtype) != (target.shape, target.dtype):
            found, wanted = (f"{t.dtype} {list(t.shape)}" for t in (tensor, target))
            raise ModelLoadError(f"{where}: is {found}; {wanted} is needed")
        target.copy_(tensor)
        self._awaited.remove((name, part))

    def finish_loading(self) -> None:
        if self._awaited:
            raise ModelLoadError(f"{self._spec.prefix}: these never came (name, part): {sorted(self._awaited)}")

    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        product = x.float() @ self.dequantize().t()
        if bias is not None:
            product += bias
        return product.to(out_dtype or x.dtype)

    def dequantize(self) -> Tensor:
        tensors = self._tensors
        return (tensors["qweight"].float() - tensors["zeros"].float()) * tensors["scales"]


def is_mine(hf_config: dict[str, Any]) -> bool:
    stored = hf_config.get("quantization_config")
    return isinstance(stored, dict) and stored.get("quant_method") == "my_quantization"


def build(context: QuantizationContext) -> QuantizationMethod:
    return MyQuantization(context.torch_device)


@hookimpl
def hotswap_quantization() -> Iterator[QuantizationProvider]:
    yield QuantizationProvider(
        name="my_quantization", build=build, detect=is_mine, summary="One byte a weight, scaled row by row."
    )
