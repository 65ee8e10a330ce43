"""The three ways in which decoder layers arrange their norms.

A block takes the residual stream and the last block's output that is still to be added to it (None when it has been), adds
it in place, and returns its own output, not yet added, with the stream. So each addition is fused with the norm that
follows, across blocks too, or with the product in front of it.

`rows` int64 [S], for the last block: the tokens whose result is wanted. All attend; the others go no further.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hotswap.core.contracts.model import ForwardContext
from hotswap.core.layers.attention import SelfAttention
from hotswap.core.layers.mlp import GatedMLP
from hotswap.core.layers.norm import RMSNorm
from hotswap.core.layers.weights import WeightMap

Stream = tuple[Tensor | None, Tensor]  # what is still to be added, and the residual stream


class Block(Protocol):
    """One decoder layer. residual [T, H] is changed in place; delta [T, H] may be too. Gives both, [S, H] with `rows`."""

    attention: SelfAttention

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> Stream: ...

    def register(self, weights: WeightMap) -> None: ...


def _narrowed(rows: Tensor | None, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    if rows is None:
        return attended, residual
    return attended.index_select(0, rows), residual.index_select(0, rows)


class PreNormBlock:
    """Llama's order: norm, attention, add, norm, MLP, add. residual_scale multiplies both outputs (Granite)."""

    __slots__ = ("_attention_norm", "_mlp", "_mlp_norm", "_scale", "attention")

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: SelfAttention,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
        residual_scale: float = 1.0,
    ) -> None:
        self._attention_norm = attention_norm
        self.attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp
        self._scale = None if residual_scale == 1.0 else residual_scale

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> Stream:
        hidden = self._attention_norm(residual) if delta is None else self._attention_norm.add(delta, residual)
        attended, residual = _narrowed(rows, self.attention.attend(hidden, positions, context), residual)
        if self._scale is None:
            delta = self.attention.project_into(attended, residual)
            hidden = self._mlp_norm(residual) if delta is None else self._mlp_norm.add(delta, residual)
            return self._mlp.into(hidden, residual), residual
        hidden = self.attention.project(attended).mul_(self._scale)
        return self._mlp(self._mlp_norm.add(hidden, residual)).mul_(self._scale), residual

    def register(self, weights: WeightMap) -> None:
        for part in (self._attention_norm, self.attention, self._mlp_norm, self._mlp):
            part.register(weights)


class SandwichBlock:
    """Gemma 2's order: norm, attention, norm, add, norm, MLP, norm, add."""

    __slots__ = ("_after_attention", "_after_mlp", "_before_attention", "_before_mlp", "_mlp", "attention")

    def __init__(
        self,
        before_attention: RMSNorm,
        attention: SelfAttention,
        after_attention: RMSNorm,
        before_mlp: RMSNorm,
        mlp: GatedMLP,
        after_mlp: RMSNorm,
    ) -> None:
        self._before_attention = before_attention
        self.attention = attention
        self._after_attention = after_attention
        self._before_mlp = before_mlp
        self._mlp = mlp
        self._after_mlp = after_mlp

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> Stream:
        hidden = self._before_attention(residual) if delta is None else self._before_attention.add(delta, residual)
        attended, residual = _narrowed(rows, self.attention.attend(hidden, positions, context), residual)
        hidden = self._before_mlp.add(self._after_attention(self.attention.project(attended)), residual)
        return self._after_mlp(self._mlp(hidden)), residual

    def register(self, weights: WeightMap) -> None:
        parts = (
            self._before_attention,
            self.attention,
            self._after_attention,
            self._before_mlp,
            self._mlp,
            self._after_mlp,
        )
        for part in parts:
            part.register(weights)


class PostNormBlock:
    """OLMo 2's order: attention, norm, add, MLP, norm, add."""

    __slots__ = ("_after_attention", "_after_mlp", "_mlp", "attention")

    def __init__(self, attention: SelfAttention, after_attention: RMSNorm, mlp: GatedMLP, after_mlp: RMSNorm) -> None:
        self.attention = attention
        self._after_attention = after_attention
        self._mlp = mlp
        self._after_mlp = after_mlp

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None = None,
    ) -> Stream:
        if delta is not None:
            residual.add_(delta)
        attended, residual = _narrowed(rows, self.attention.attend(residual, positions, context), residual)
        residual.add_(self._after_attention(self.attention.project(attended)))
        return self._after_mlp(self._mlp(residual)), residual

    def register(self, weights: WeightMap) -> None:
        for part in (self.attention, self._after_attention, self._mlp, self._after_mlp):
            part.register(weights)
