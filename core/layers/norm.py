"""Root-mean-square norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..contracts.model import WeightSpec
from .ops import OpTable
from .reference import rms_norm_wide
from .weights import WeightMap, WeightTarget, check_float


class RMSNorm:
    """x [T, D] -> [T, D].

    wide: the weight multiplies in float32, before the cast back to x's dtype (gemma, olmo2); it is then kept in
    float32. Where activations are float32 the two orders are one, and the chosen kernel serves both. one_plus: the
    checkpoint stores the weight minus one.
    """

    __slots__ = ("_eps", "_name", "_norm", "_one_plus", "add", "weight")

    def __init__(
        self,
        ops: OpTable,
        name: str,
        size: int,
        eps: float,
        *,
        wide: bool = False,
        one_plus: bool = False,
        dtype: torch.dtype,
        activation_dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self._name = name
        self._eps = eps
        self._one_plus = one_plus
        self.weight = torch.empty(size, dtype=torch.float32 if wide else dtype, device=device)
        rounds = wide and (activation_dtype or dtype) != torch.float32
        self._norm = rms_norm_wide if rounds else ops.rms_norm
        # add(x, residual): residual += x in place, then the norm of the sum. Bound here: it is on the hot path.
        self.add: Callable[[Tensor, Tensor], Tensor] = self._add_wide if rounds else _bind_add(ops, self.weight, eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self.weight, self._eps)

    def _add_wide(self, x: Tensor, residual: Tensor) -> Tensor:
        residual.add_(x)
        return rms_norm_wide(residual, self.weight, self._eps)

    def register(self, weights: WeightMap) -> None:
        """Says which tensor it takes."""
        weights.add([WeightTarget(WeightSpec(f"{self._name}.weight", tuple(self.weight.shape)), self._load)])

    def _load(self, tensor: Tensor) -> None:
        check_float(f"{self._name}.weight", tensor)
        self.weight.copy_(tensor.float() + 1.0 if self._one_plus else tensor)


def _bind_add(ops: OpTable, weight: Tensor, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    add_rms_norm = ops.add_rms_norm

    def add(x: Tensor, residual: Tensor) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    return add
