"""Self-attention over the paged cache."""

from __future__ import annotations

from torch import Tensor

from ..contracts.attention import AttentionLayer
from ..contracts.model import ForwardContext
from .linear import Linear
from .norm import RMSNorm
from .weights import WeightMap


class SelfAttention:
    """hidden [T, H] -> [T, H]: fused projection, optional norms of queries and keys, rotation, attention, output
    projection.

    cos_sin: the layer's rotation table, None for a layer without positions. q_norm, k_norm: over each head, or over
    all heads of a token together when `norm_all_heads`.
    """

    __slots__ = (
        "_cos_sin",
        "_head_dim",
        "_k_norm",
        "_norm_all_heads",
        "_output",
        "_q_norm",
        "_qkv",
        "_split",
        "layer",
    )

    def __init__(
        self,
        layer: AttentionLayer,
        qkv: Linear,
        output: Linear,
        cos_sin: Tensor | None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        norm_all_heads: bool = False,
    ) -> None:
        self.layer = layer
        self._qkv = qkv
        self._output = output
        self._cos_sin = cos_sin
        self._q_norm = q_norm
        self._k_norm = k_norm
        self._norm_all_heads = norm_all_heads
        self._head_dim = layer.head_dim_k
        self._split = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)

    def __call__(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        return self.project(self.attend(hidden, positions, context))

    def project(self, attended: Tensor) -> Tensor:
        """What `attend` gave, or some rows of it -> [S, H]."""
        return self._output(attended)

    def project_into(self, attended: Tensor, residual: Tensor) -> Tensor | None:
        """As `project`; None when the result has been added to residual [S, H] already."""
        return None if self._output.add_to(attended, residual) else self._output(attended)

    def attend(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """hidden [T, H] -> [T, heads * head_dim_v]: all but the output projection."""
        tokens = hidden.shape[0]
        # q, k and v are views of one product: the rotation works in place on them and the cache write reads them
        # strided.
        q, k, v = self._qkv(hidden).view(tokens, -1, self._head_dim).split_with_sizes(self._split, 1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._normed(self._q_norm, q), self._normed(self._k_norm, k)
        attended = context.attend(self.layer, q, k, v, positions, self._cos_sin)
        return attended.view(tokens, -1)

    def _normed(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """x [T, heads, D] -> a new, contiguous [T, heads, D]."""
        flat = x.reshape(x.shape[0], -1) if self._norm_all_heads else x.reshape(-1, self._head_dim)
        return norm(flat).view(x.shape)

    def register(self, weights: WeightMap) -> None:
        self._qkv.register(weights)
        self._output.register(weights)
        for norm in (self._q_norm, self._k_norm):
            if norm is not None:
                norm.register(weights)
