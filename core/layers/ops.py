"""The kernels that were chosen for a model, one per op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..contracts.kernels import LinearKernel
from . import reference


@dataclass(frozen=True, slots=True)
class OpTable:
    """One implementation per name of `contracts.kernels.OPS`; the signatures are described there."""

    linear: LinearKernel
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    silu_mul: Callable[[Tensor], Tensor]
    gelu_tanh_mul: Callable[[Tensor], Tensor]

    @classmethod
    def reference(cls) -> OpTable:
        """The torch references: correct everywhere, fast nowhere."""
        return cls(
            linear=reference.ReferenceLinear(),
            rms_norm=reference.rms_norm,
            add_rms_norm=reference.add_rms_norm,
            rope=reference.rope,
            silu_mul=reference.silu_mul,
            gelu_tanh_mul=reference.gelu_tanh_mul,
        )
