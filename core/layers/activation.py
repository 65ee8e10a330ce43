"""Gated activations by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..errors import ModelLoadError
from .ops import OpTable

_OP_OF_NAME = {"silu": "silu_mul", "swish": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """op: its name in `contracts.kernels.OPS`. apply: [T, 2 I] -> [T, I]."""

    op: str
    apply: Callable[[Tensor], Tensor]

    def __call__(self, gate_up: Tensor) -> Tensor:
        return self.apply(gate_up)


def gated_activation(ops: OpTable, name: str) -> GatedActivation:
    """That of a config's `hidden_act`. Raises ModelLoadError when there is none."""
    check_activation(name)
    op = _OP_OF_NAME[name]
    return GatedActivation(op, getattr(ops, op))


def check_activation(name: str, field: str = "hidden_act") -> None:
    """Raises ModelLoadError, naming the config field, when there is no such gated activation."""
    if name not in _OP_OF_NAME:
        raise ModelLoadError(f"config.json: {field}={name!r} is not supported here; known: {', '.join(_OP_OF_NAME)}")
