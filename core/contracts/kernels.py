"""Kind `kernels`: one fast implementation of one op. The torch reference of every op lives in core/layers/reference.py and
is both the oracle and the automatic choice where no kernel can run.

Ops and their signatures (T tokens, all tensors on the worker's device; "row-strided" means only the last dimensions are
contiguous). Kernels are called on the worker's device thread and must not keep their inputs.

linear          a `LinearKernel` object: packs a weight once, then multiplies.
rms_norm        (x [T, D], weight [D], eps) -> [T, D]; computed in float32, `weight` applied after the cast back to x.dtype
add_rms_norm    (x [T, D], residual [T, D], weight [D], eps) -> normed [T, D]; residual += x in place
rope            (q [T, H, D] row-strided, k [T, KVH, D] row-strided, positions int64 [T],
                cos_sin float32 [max_pos, D_rot]) -> None; rotates in place, half-rotation ("neox") pairs over the first
                D_rot dimensions; cos_sin holds cos | sin halves
silu_mul        (gate_up [T, 2 I]) -> [T, I]: silu(gate) * up
gelu_tanh_mul   (gate_up [T, 2 I]) -> [T, I]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .provider import BuildContext, Provider

if TYPE_CHECKING:
    from torch import Tensor

OPS = ("linear", "rms_norm", "add_rms_norm", "rope", "silu_mul", "gelu_tanh_mul")


class PackedWeight(ABC):
    """A weight in a kernel's own form. out_features, in_features: the logical shape [N, K]."""

    out_features: int
    in_features: int

    @abstractmethod
    def unpack(self) -> Tensor:
        """The logical weight [N, K] again: the oracle for tests."""


class LinearKernel(ABC):
    """Matrix products with weights packed once."""

    @abstractmethod
    def pack(self, weight: Tensor) -> PackedWeight:
        """weight [N, K]. The caller drops its own copy afterwards."""

    @abstractmethod
    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: Any | None = None) -> Tensor:
        """x [T, K] -> [T, N] in out_dtype (default x.dtype), accumulated in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProvider(Provider[Any]):
    """op: one of OPS. Names are unique per op; `build` returns a LinearKernel, or a callable with the op's signature."""

    op: str


KernelFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelContext(BuildContext):
    """dtype: the activations' dtype name. op: the op asked for."""

    op: str
    dtype: str = "float32"
