"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from .activation import GatedActivation
from .linear import Linear
from .weights import WeightMap


class GatedMLP:
    """x [T, H] -> [T, H]: down(activation(gate(x)) * up(x)), with gate and up in one product.

    The result is a new tensor, which the caller may change in place.
    """

    __slots__ = ("_activation", "_down", "_gate_up", "_op")

    def __init__(self, gate_up: Linear, down: Linear, activation: GatedActivation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation.apply
        self._op = activation.op

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._inner(x))

    def into(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """As a call; None when the result has been added to residual [T, H] already."""
        inner = self._inner(x)
        return None if self._down.add_to(inner, residual) else self._down(inner)

    def _inner(self, x: Tensor) -> Tensor:
        gated = self._gate_up.gated(x, self._op)
        return self._activation(self._gate_up(x)) if gated is None else gated

    def register(self, weights: WeightMap) -> None:
        self._gate_up.register(weights)
        self._down.register(weights)
