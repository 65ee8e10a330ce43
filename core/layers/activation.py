"""Gated activations by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..errors import ModelLoadError
from .ops import OpTable

_OP_OF_NAME = {"silu": "silu_mul", "swish": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}


def gated_activation(ops: OpTable, name: str) -> Callable[[Tensor], Tensor]:
    """The op [T, 2 I] -> [T, I] for a config's `hidden_act`."""
    check_activation(name)
    activation: Callable[[Tensor], Tensor] = getattr(ops, _OP_OF_NAME[name])
    return activation


def check_activation(name: str, field: str = "hidden_act") -> None:
    """Raises ModelLoadError, naming the config field, when there is no such gated activation."""
    if name not in _OP_OF_NAME:
        raise ModelLoadError(f"config.json: {field}={name!r} is not supported here; known: {', '.join(_OP_OF_NAME)}")
