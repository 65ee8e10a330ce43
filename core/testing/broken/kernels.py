"""Kernels with one fault each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...contracts.kernels import KernelProvider, LinearKernel, PackedWeight
from ...layers.ops import OpTable
from ...layers.sampling.noise import uniform
from ..templates.kernels import MyKernelsLinear
from . import BrokenSample

_REFERENCE = OpTable.reference()


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


class GatesWithTheSecondHalf(MyKernelsLinear):
    """Fuses the activation, with gate and up exchanged."""

    def apply_gated(self, x: Tensor, weight: PackedWeight, op: str) -> Tensor:
        gated = up_before_gate if op == "silu_mul" else gelu_without_tanh
        return gated(self.apply(x, weight, None))


class AddsAndDeniesIt(MyKernelsLinear):
    """The caller adds the product a second time."""

    def add_product(self, x: Tensor, weight: PackedWeight, residual: Tensor) -> bool:
        residual.add_(self.apply(x, weight, None))
        return False


class ReusesItsOutput(MyKernelsLinear):
    """Hands out one buffer again and again."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: Any | None = None) -> Tensor:
        out = super().apply(x, weight, bias, out_dtype)
        return self._buffers.setdefault((out.shape, out.dtype), out).copy_(out)


def norms_large_batches_otherwise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Right within float32's accuracy, but with other bits in a larger batch."""
    wide = x.float() if len(x) < 4 else x.double()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def writes_padding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Takes slot -1 for the last one, as indexing does."""
    slots = slot_mapping % (keys.shape[0] * keys.shape[1])
    _REFERENCE.rope_write_kv(q, k, v, positions, cos_sin, keys, values, slots)


def leaves_padding(*arguments: Any) -> None:
    """Tokens beyond those of the rows stay what they were."""
    starts, input_ids = arguments[1], arguments[6]
    before, used = input_ids.clone(), int(starts[-1])
    _REFERENCE.step_inputs(*arguments)
    input_ids[used:] = before[used:]


def highest_of_equal_ids(logits: Tensor) -> tuple[Tensor, Tensor]:
    values = logits.amax(1)
    equal = (logits == values[:, None]).long() * torch.arange(1, 1 + logits.shape[1])
    return values, (equal.amax(1) - 1).clamp_(min=0)


def subtracts_before_it_divides(logits: Tensor, local: Tensor, rows: Tensor, divisors: Tensor, amounts: Tensor) -> None:
    values, factors = logits[local] - amounts[rows], divisors[rows]
    logits[local] = torch.where(values > 0, values / factors, values * factors)


def keeps_every_tie(
    logits: Tensor,
    best: Tensor,
    temperature: Tensor,
    min_p: Tensor | None,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    ordered: bool,
) -> Tensor:
    """top_k keeps whatever is as large as the k-th logit; with other filters it is right."""
    if not ordered or bool((top_p < 1).any()) or (min_p is not None and bool(min_p.any())):
        return _REFERENCE.draw(logits, best, temperature, min_p, top_k, top_p, seeds, positions, ordered)
    kth = logits.sort(1, descending=True).values.gather(1, (top_k - 1).clamp(max=logits.shape[1] - 1)[:, None])
    weights = ((logits.double() - best[:, None]) / temperature[:, None]).exp().masked_fill(logits < kth, 0.0)
    cumulative = weights.cumsum(1)
    target = uniform(seeds, positions)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)


def ranks_are_places(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Equal logits have different ranks."""
    ids, logprobs, ranks = _REFERENCE.gather_logprobs(logits, chosen, count)
    ranks[:, 1:] = torch.arange(1, ranks.shape[1])
    return ids, logprobs, ranks


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
    _sample(
        "gates_with_the_second_half", "linear", GatesWithTheSecondHalf, "linear_fused_forms_equal_their_definitions"
    ),
    _sample("adds_and_denies_it", "linear", AddsAndDeniesIt, "linear_fused_forms_equal_their_definitions"),
    _sample("reuses_its_output", "linear", ReusesItsOutput, "results_are_not_overwritten"),
    _sample(
        "norms_large_batches_otherwise", "rms_norm", norms_large_batches_otherwise, "row_does_not_depend_on_its_batch"
    ),
    _sample("writes_padding", "rope_write_kv", writes_padding, "rope_write_kv_rotates_and_writes"),
    _sample("leaves_padding", "step_inputs", leaves_padding, "step_inputs_equal_their_definition"),
    _sample("highest_of_equal_ids", "argmax", highest_of_equal_ids, "argmax_gives_the_lowest_id"),
    _sample("subtracts_before_it_divides", "penalize", subtracts_before_it_divides, "penalize_equals_its_definition"),
    _sample("keeps_every_tie", "draw", keeps_every_tie, "draw_orders_equal_tokens_by_id"),
    _sample("ranks_are_places", "gather_logprobs", ranks_are_places, "gather_logprobs_equals_its_definition"),
)
