"""Kernels `my_kernels`: two ops, one of each form that a kernel can have. Ops that are not offered are served by others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hotswap.core.contracts import KernelContext, KernelProvider, LinearKernel, PackedWeight, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, D] -> [T, D]: computed in float32; the weight multiplies after the cast back."""
    wide = x.float()
    wide = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return weight * wide.to(x.dtype)


class MyKernelsWeight(PackedWeight):
    """Kept transposed: [K, N]."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.columns = weight.t().contiguous()

    def unpack(self) -> Tensor:
        return self.columns.t()


class MyKernelsLinear(LinearKernel):
    def pack(self, weight: Tensor) -> PackedWeight:
        return MyKernelsWeight(weight)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: Any | None = None) -> Tensor:
        columns: Tensor = weight.columns  # type: ignore[attr-defined]  # pack() made it
        product = x.float() @ columns.float()
        if bias is not None:
            product += bias
        return product.to(out_dtype or x.dtype)


def unavailable(context: KernelContext) -> list[str]:
    if context.dtype not in ("float32", "bfloat16"):
        return [f"its dtypes are float32 and bfloat16, not {context.dtype}"]
    return []


@hookimpl
def hotswap_kernels() -> Iterator[KernelProvider]:
    summary = "Plain torch, with the weight of a product kept transposed."
    for op, build in (("rms_norm", lambda context: rms_norm), ("linear", lambda context: MyKernelsLinear())):
        yield KernelProvider(name="my_kernels", op=op, build=build, unavailable=unavailable, summary=summary)
