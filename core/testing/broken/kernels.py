"""Kernels with one fault each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...contracts.kernels import KernelProvider, LinearKernel, PackedWeight
from ..templates.kernels import MyKernelsLinear
from . import BrokenSample


def eps_outside_the_root(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype)


def norm_in_half_precision(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def residual_gets_the_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The residual stream receives what should go to the next layer only."""
    wide = (x + residual).float()
    normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return residual.copy_(normed).clone()


def adds_into_x(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The residual is right, and x, which is the caller's, is not what it was."""
    residual.add_(x)
    wide = x.copy_(residual).float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def up_before_gate(gate_up: Tensor) -> Tensor:
    up, gate = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_without_tanh(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


def interleaved_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotates the pairs (2 i, 2 i + 1)."""
    half = cos_sin.shape[1] // 2
    cosine, sine = cos_sin[positions][:, None].chunk(2, -1)
    for x in (q, k):
        a, b = x[..., 0 : 2 * half : 2].float(), x[..., 1 : 2 * half : 2].float()
        x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2] = a * cosine - b * sine, b * cosine + a * sine


class AccumulatesInBfloat16(MyKernelsLinear):
    """Sums sixteen pieces of K, each rounded."""

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: Any | None = None) -> Tensor:
        pieces = zip(x.tensor_split(16, 1), weight.unpack().tensor_split(16, 1), strict=True)
        total = torch.zeros(x.shape[0], weight.out_features, dtype=torch.bfloat16)
        for part, columns in pieces:
            total += F.linear(part.float(), columns.float()).bfloat16()
        exact = total.float() if bias is None else total.float() + bias.float()
        return exact.to(out_dtype or x.dtype)


class ForgetsTheBias(MyKernelsLinear):
    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: Any | None = None) -> Tensor:
        return super().apply(x, weight, None, out_dtype)


class UnpacksTransposed(MyKernelsLinear):
    """Right products, but the weight cannot be had back as it was."""

    def pack(self, weight: Tensor) -> PackedWeight:
        packed = super().pack(weight)
        packed.unpack = lambda: weight.flip(0)  # type: ignore[method-assign]
        return packed


class ReusesItsOutput(MyKernelsLinear):
    """Hands out one buffer again and again."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: Any | None = None) -> Tensor:
        out = super().apply(x, weight, bias, out_dtype)
        return self._buffers.setdefault((out.shape, out.dtype), out).copy_(out)


def _sample(name: str, op: str, kernel: Any, caught_by: str) -> BrokenSample:
    def build(context: Any) -> Any:
        return kernel() if isinstance(kernel, type) and issubclass(kernel, LinearKernel) else kernel

    provider = KernelProvider(name=name, op=op, build=build, summary=f"broken: {name}")
    return BrokenSample(name, provider, caught_by, op=op)


BROKEN: tuple[BrokenSample, ...] = (
    _sample("eps_outside_the_root", "rms_norm", eps_outside_the_root, "rms_norm_equals_its_definition"),
    _sample("norm_in_half_precision", "rms_norm", norm_in_half_precision, "rms_norm_equals_its_definition"),
    _sample(
        "residual_gets_the_norm", "add_rms_norm", residual_gets_the_norm, "add_rms_norm_adds_in_place_and_norms_the_sum"
    ),
    _sample("adds_into_x", "add_rms_norm", adds_into_x, "add_rms_norm_adds_in_place_and_norms_the_sum"),
    _sample("up_before_gate", "silu_mul", up_before_gate, "gated_activation_equals_its_definition"),
    _sample("gelu_without_tanh", "gelu_tanh_mul", gelu_without_tanh, "gated_activation_equals_its_definition"),
    _sample("interleaved_rope", "rope", interleaved_rope, "rope_rotates_in_place"),
    _sample("accumulates_in_bfloat16", "linear", AccumulatesInBfloat16, "linear_accumulates_in_float32"),
    _sample("forgets_the_bias", "linear", ForgetsTheBias, "linear_equals_its_definition"),
    _sample("unpacks_transposed", "linear", UnpacksTransposed, "linear_unpacks_what_it_packed"),
    _sample("reuses_its_output", "linear", ReusesItsOutput, "results_are_not_overwritten"),
)
