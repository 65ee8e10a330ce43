"""Linear layers: one or more checkpoint matrices, fused below each other, under a quantization method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ..contracts.model import WeightSpec
from ..contracts.quantization import LayerSpec, ParamSpec, QuantizationMethod
from .weights import Parameter, WeightMap, WeightTarget


class Linear:
    """x [T, K] -> [T, N]. Calls `apply` of the layer method that the quantization made for it.

    prefix: the fused layer's dotted name ("model.layers.0.self_attn.qkv_proj"). sources: dotted names of the
    checkpoint's modules, in row order; parts: rows of each.
    """

    __slots__ = ("_apply", "_bias", "_bias_parameter", "_spec", "add_to", "gated", "method", "sources")

    def __init__(
        self,
        quantization: QuantizationMethod,
        prefix: str,
        *,
        in_features: int,
        sources: tuple[str, ...],
        parts: tuple[int, ...],
        bias: bool = False,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> None:
        self._spec = LayerSpec("linear", prefix, in_features, sum(parts), parts, bias)
        self.sources = sources
        self.method = quantization.create(self._spec)
        self._apply: Callable[..., Tensor] = self.method.apply
        # The method's fused forms; bound here, as they are asked at each call: a layer with a bias has none.
        self.gated: Callable[[Tensor, str], Tensor | None] = _no_gated if bias else self.method.apply_gated
        self.add_to: Callable[[Tensor, Tensor], bool] = _no_add if bias else self.method.add_product
        names = tuple(f"{source}.bias" for source in sources)
        self._bias_parameter = Parameter(names, parts, dtype, device) if bias else None
        self._bias = self._bias_parameter.tensor if self._bias_parameter is not None else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._apply(x, self._bias)

    def register(self, weights: WeightMap) -> None:
        """Says which tensors it takes."""
        weights.add(self._targets(), self.method.finish_loading)
        if self._bias_parameter is not None:
            weights.add(self._bias_parameter.targets())

    def _targets(self) -> Iterator[WeightTarget]:
        for param in self.method.params():
            for part, source in enumerate(self.sources):
                spec = WeightSpec(f"{source}.{param.name}", part_shape(param, self._spec.parts[part]))
                yield WeightTarget(spec, partial(self.method.load, param.name, part))


def _no_gated(x: Tensor, op: str) -> None:
    return None


def _no_add(x: Tensor, residual: Tensor) -> bool:
    return False


def part_shape(param: ParamSpec, rows: int) -> tuple[int, ...]:
    """The shape of one fused part's checkpoint tensor, for a part of `rows` output rows. Scalars are the same for
    every part."""
    if not param.shape:
        return ()
    shape = list(param.shape)
    shape[param.part_dim] = rows // param.pack_factor
    return tuple(shape)
