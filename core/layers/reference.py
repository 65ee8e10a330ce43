"""The torch reference of every op in `contracts/kernels.py`, and of attention: oracle of the kernels, and what runs
where none can.
 Numerics follow transformers' modelling code, so that float32 results agree closely: norms and rotations are computed
in float32 whatever the activations' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contracts.attention import AttentionLayer
from ..contracts.kernels import LinearKernel, PackedWeight


class PlainWeight(PackedWeight):
    """A weight that is not repacked: the tensor itself, [N, K]."""

    __slots__ = ("in_features", "out_features", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.out_features, self.in_features = tensor.shape

    def unpack(self) -> Tensor:
        return self.tensor


class ReferenceLinear(LinearKernel):
    """`torch.nn.functional.linear`. Keeps the weight as it is, so packing costs no memory."""

    def pack(self, weight: Tensor) -> PlainWeight:
        return PlainWeight(weight)

    def apply(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        tensor = weight.tensor if isinstance(weight, PlainWeight) else weight.unpack()
        # The operands are widened, not the product: one rounded to x.dtype first would make ties between logits.
        dtype = out_dtype or x.dtype
        wide = torch.promote_types(torch.promote_types(x.dtype, tensor.dtype), dtype)
        return F.linear(x.to(wide), tensor.to(wide), None if bias is None else bias.to(wide)).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] -> [..., D] in x.dtype. The mean square is taken in float32; `weight` multiplies after the cast
    back."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rms_norm_wide(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm` with a float32 `weight` that multiplies *before* the cast back (gemma, olmo2). Equal to it in
    float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place; the norm of the sum, [..., D]."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotates q [T, H, D] and k [T, KVH, D] in place: pairs (i, i + D_rot / 2) of the first D_rot dimensions.

    positions: int64 [T]. cos_sin: float32 [max_pos, D_rot], cosines in the first half of a row and sines in the second.
    """
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=2)  # [T, 1, D_rot / 2] each
    for x in (q, k):
        first, second = x[..., :half], x[..., half : 2 * half]
        a, b = first.float(), second.float()
        rotated_first = a * cos - b * sin
        rotated_second = b * cos + a * sin
        first.copy_(rotated_first)  # only now: in float32 `a` and `b` are the stored values themselves
        second.copy_(rotated_second)


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
) -> None:
    """The op of that name in contracts/kernels.py."""
    if cos_sin is not None:
        rope(q, k, positions, cos_sin)
    slots = slot_mapping[: k.shape[0]]
    written = slots >= 0  # -1: padding, or a token that is cached already
    slots, block_size = slots[written], keys.shape[1]
    at = (slots // block_size, slots % block_size)
    keys[at] = k[: len(written)][written].to(keys.dtype)
    values[at] = v[: len(written)][written].to(values.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]: silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]: gelu(gate) * up with gelu's tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def attention(query: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, causal: bool = True) -> Tensor:
    """Dense attention of a context's last q tokens over all its n tokens, in float32: the definition that backends
    must meet.

    query [q, H, Dk], keys [n, KVH, Dk], values [n, KVH, Dv] -> float32 [q, H, Dv].
    """
    num_queries, length = query.shape[0], keys.shape[0]
    group = layer.num_heads // layer.num_kv_heads
    keys, values = keys.float().repeat_interleave(group, dim=1), values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,nhd->hqn", query.float(), keys) * layer.scale
    if layer.soft_cap is not None:
        scores = torch.tanh(scores / layer.soft_cap) * layer.soft_cap
    at_query = torch.arange(length - num_queries, length, device=query.device).unsqueeze(1)
    at_key = torch.arange(length, device=query.device).unsqueeze(0)
    if layer.alibi_slopes is not None:
        scores += layer.alibi_slopes.float()[:, None, None] * (at_key - at_query)
    hidden = at_key > at_query if causal else torch.zeros(num_queries, length, dtype=torch.bool, device=query.device)
    if layer.window is not None:
        hidden = hidden | (at_query - at_key >= layer.window)
    scores.masked_fill_(hidden, float("-inf"))
    # What no query sees may be a freed block's garbage, and zero times NaN is NaN.
    values = values.masked_fill(hidden.all(dim=0)[:, None, None], 0.0)
    if layer.sinks is not None:
        sinks = layer.sinks.float()[:, None, None].expand(-1, num_queries, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hqn,nhd->qhd", weights, values)
