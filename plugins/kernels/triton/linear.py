"""Op `linear`: our kernels where streaming the weights is what takes time, torch's library (cuBLAS) for many tokens.

With `deterministic` every product goes through one kernel and one launch shape, so that a row's bits depend neither on
the other rows nor on how many there are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hotswap.core.contracts.kernels import KernelContext, LinearKernel, PackedWeight
from hotswap.core.layers.reference import PlainWeight, ReferenceLinear

from .gated_linear import gated_product
from .launch import ceil_div, interpreting, num_sms, pdl_options, use_pdl
from .linear_kernels import dot_kernel, matvec_kernel
from .linear_shapes import (
    ADDING_TOKENS,
    MATVEC_TOKENS,
    Capability,
    Dot,
    Early,
    Matvec,
    Shape,
    fixed_shape,
    gated_shape,
    shape_for,
)

_ALIGNMENT = 16  # bytes of the widest load
_COUNTERS = 4096  # tiles of a launch whose K is split between programs
_HALF = (torch.bfloat16, torch.float16)


def build_linear(context: KernelContext) -> TritonLinear:
    capability = context.device.capability if context.device.kind == "cuda" else (0, 0)
    return TritonLinear(capability, deterministic=context.config.deterministic, pdl=use_pdl(context))


class TritonLinear(LinearKernel):
    """Keeps weights as they are. Weights and activations of one dtype are served by kernels, mixtures by torch."""

    def __init__(self, capability: Capability, *, deterministic: bool = False, pdl: bool = False) -> None:
        self._capability = capability
        self._deterministic = deterministic
        self._pdl = pdl
        self._counters: dict[torch.device, Tensor] = {}

    def pack(self, weight: Tensor) -> PlainWeight:
        self.counters(weight.device)  # now, not in the middle of a graph's capture
        return PlainWeight(_aligned(weight))

    def counters(self, device: torch.device) -> Tensor:
        """int32 zeros that the programs of a split launch count in and leave as zeros; one launch at a time."""
        if device not in self._counters:
            self._counters[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        return self._counters[device]

    def apply(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        tensor = weight.tensor if isinstance(weight, PlainWeight) else weight.unpack()
        dtype = out_dtype or x.dtype
        if self._deterministic:
            return self._fixed(x, tensor, bias, dtype)
        if x.dtype is not tensor.dtype or x.dtype not in _HALF:
            return ReferenceLinear().apply(x, weight, bias, out_dtype)
        shape = self.shape(x.shape[0], tensor)
        if shape is None:
            return _library(x, tensor, bias, dtype)
        return product(x, tensor, bias, dtype, shape, self.counters(x.device), self._pdl)

    def apply_gated(self, x: Tensor, weight: PackedWeight, op: str) -> Tensor | None:
        tensor = weight.tensor if isinstance(weight, PlainWeight) else weight.unpack()
        if self._deterministic or x.dtype is not tensor.dtype or x.dtype not in _HALF:
            return None
        n, k = tensor.shape
        shape = gated_shape(self._capability, n // 2, k, x.shape[0])
        return None if shape is None else gated_product(_usable(x), tensor, shape, gelu=op == "gelu_tanh_mul")

    def add_product(self, x: Tensor, weight: PackedWeight, residual: Tensor) -> bool:
        """By torch's library, whose products can begin at a sum: that saves the norm behind them reading both."""
        tensor = weight.tensor if isinstance(weight, PlainWeight) else weight.unpack()
        if self._deterministic or not x.is_cuda or x.dtype not in _HALF:
            return False
        if not x.dtype is tensor.dtype is residual.dtype or x.shape[0] < ADDING_TOKENS:
            return False
        residual.addmm_(x, tensor.t())
        return True

    def shape(self, tokens: int, weight: Tensor) -> Shape | None:
        """The launch shape for so many rows; None: torch's library."""
        n, k = weight.shape
        return shape_for(self._capability, n, k, tokens, num_sms(weight.device), weight.element_size())

    def _fixed(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if x.dtype is not weight.dtype:
            x, weight = x.float(), _aligned(weight.float())
        n, k = weight.shape
        shape = fixed_shape(self._capability, n, k, x.shape[0], num_sms(x.device), weight.element_size())
        return product(x, weight, bias, dtype, shape, self.counters(x.device), self._pdl)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, shape: Shape, counters: Tensor, pdl: bool
) -> Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias, in one launch. weight as `TritonLinear.pack` left it.

    Raises ValueError when a Matvec is asked for more than 4 rows.
    """
    tokens = x.shape[0]
    out = torch.empty((tokens, weight.shape[0]), dtype=dtype, device=x.device)
    if tokens == 0:
        return out
    x = _usable(x)
    if isinstance(shape, Matvec):
        _matvec(x, weight, bias, out, shape, pdl)
    else:
        _dot(x, weight, bias, out, shape, counters, pdl)
    return out


def _matvec(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, shape: Matvec, pdl: bool) -> None:
    tokens, (n, k) = x.shape[0], weight.shape
    if tokens > MATVEC_TOKENS:
        raise ValueError(f"the matrix-vector kernel takes up to {MATVEC_TOKENS} rows, not {tokens}")
    matvec_kernel[(ceil_div(n, shape.block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        tokens,
        x.stride(0),
        n,
        K=k,
        ROWS=tokens if tokens < 3 else 4,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        ONE_BLOCK=k <= shape.block_k,
        HAS_BIAS=bias is not None,
        num_warps=shape.warps,
        num_stages=1,
        **pdl_options(pdl),
    )


def _dot(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, shape: Dot, counters: Tensor, pdl: bool) -> None:
    tokens, (n, k) = x.shape[0], weight.shape
    tiles = ceil_div(tokens, shape.block_t) * ceil_div(n, shape.block_n)
    # One after the other gives the same bits, where there are more tiles than counters.
    split = shape.segments if shape.split and tiles <= counters.numel() else 1
    partial = out
    if split > 1:
        size = tiles * split * shape.block_t * shape.block_n
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    early = shape.early
    if early is Early.BULK and k * weight.element_size() % _ALIGNMENT:
        early = Early.LINES
    dot_kernel[(tiles * split,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        partial,
        counters,
        tokens,
        x.stride(0),
        n,
        K=k,
        BLOCK_T=shape.block_t,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        SPLIT_K=split,
        SEGMENTS=shape.segments,
        EVEN_K=k % (shape.block_k * shape.segments) == 0,
        W_FIRST=shape.w_first,
        EARLY=early.value,
        EARLY_BYTES=shape.early_bytes,
        HAS_BIAS=bias is not None,
        WIDE=interpreting(),  # its products of bfloat16 are wrong
        num_warps=shape.warps,
        num_stages=shape.stages,
        **pdl_options(pdl),
    )


def _library(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """torch's product, never rounded to x.dtype when more is asked for."""
    if dtype is x.dtype and (bias is None or bias.dtype is dtype):
        return F.linear(x, weight, bias)
    if not x.is_cuda or torch.version.hip is not None:  # no product with another out_dtype there
        return ReferenceLinear().apply(x, PlainWeight(weight), bias, dtype)
    wide = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return (wide if bias is None else wide.add_(bias)).to(dtype)


def _aligned(weight: Tensor) -> Tensor:
    """The weight with contiguous rows, from an address that the widest loads take."""
    weight = weight.contiguous()
    return weight if weight.data_ptr() % _ALIGNMENT == 0 else weight.clone()


def _usable(x: Tensor) -> Tensor:
    """x with contiguous rows that all begin where the widest loads may, if rows have such a length: else another
    variant of the kernel would be compiled."""
    step = x.stride(0) * x.element_size()
    if x.stride(1) == 1 and (x.data_ptr() % _ALIGNMENT == 0 and step % _ALIGNMENT == 0):
        return x
    return x.contiguous() if not x.is_contiguous() or x.data_ptr() % _ALIGNMENT == 0 else x.clone()
