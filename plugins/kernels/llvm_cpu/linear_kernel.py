"""The `linear` op of the contract over this folder's packed products."""

from __future__ import annotations

import torch
from torch import Tensor

from hotswap.core.contracts.kernels import LinearKernel, PackedWeight

from .linear import PackedLinear, linear, pack


class LlvmWeight(PackedWeight):
    """A weight in column panels."""

    __slots__ = ("in_features", "out_features", "packed")

    def __init__(self, packed: PackedLinear) -> None:
        self.packed = packed
        self.out_features, self.in_features = packed.n, packed.k

    def unpack(self) -> Tensor:
        return self.packed.unpack()


class LlvmLinear(LinearKernel):
    """Weights stay in their dtype; products are summed in float32, in one order whatever the batch."""

    def pack(self, weight: Tensor) -> PackedWeight:
        return LlvmWeight(pack(weight))

    def apply(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        return linear(x, weight.packed, bias, None, out_dtype)  # type: ignore[attr-defined]  # pack() made it
