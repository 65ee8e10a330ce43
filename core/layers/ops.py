"""The kernels that were chosen for a model, one per op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..contracts.kernels import LinearKernel
from . import reference
from .sampling import blockwise, draw, logprobs, penalties
from .step_inputs import step_inputs


@dataclass(frozen=True, slots=True)
class OpTable:
    """One implementation per name of `contracts.kernels.OPS`; the signatures are described there."""

    linear: LinearKernel
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    silu_mul: Callable[[Tensor], Tensor]
    gelu_tanh_mul: Callable[[Tensor], Tensor]
    rope_write_kv: Callable[..., None]
    step_inputs: Callable[..., None]
    argmax: Callable[[Tensor], tuple[Tensor, Tensor]]
    penalize: Callable[..., None]
    draw: Callable[..., Tensor]
    gather_logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]

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
            rope_write_kv=reference.rope_write_kv,
            step_inputs=step_inputs,
            argmax=blockwise.row_max,
            penalize=penalties.penalize,
            draw=draw.draw,
            gather_logprobs=logprobs.gather_logprobs,
        )
