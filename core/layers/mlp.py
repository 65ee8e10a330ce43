"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .linear import Linear
from .weights import WeightMap


class GatedMLP:
    """x [T, H] -> [T, H]: down(activation(gate(x)) * up(x)), with gate and up in one product.

    The result is a new tensor, which the caller may change in place.
    """

    __slots__ = ("_activation", "_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear, activation: Callable[[Tensor], Tensor]) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._gate_up(x)))

    def register(self, weights: WeightMap) -> None:
        self._gate_up.register(weights)
        self._down.register(weights)
