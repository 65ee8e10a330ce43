"""Kind `attention`: reads and writes the paged KV cache. Called on the worker's device thread, once a layer and step.

Shapes: T tokens in the step (padded count where a graph is replayed), R requests, H query heads, KVH key/value heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from .provider import BuildContext

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one layer keeps per token. Layers with an equal spec form a cache group with block tables of its own."""

    kind: Literal["full", "window", "latent", "state", "none"]
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str  # "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
    window: int | None = None  # tokens that a query sees, itself included; for kind "window"

    @property
    def bytes_per_token(self) -> int:
        """KV bytes that one token takes in one layer."""
        itemsize = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}[self.dtype]
        return self.num_kv_heads * (self.head_dim_k + self.head_dim_v) * itemsize


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a backend lays out one layer's cache. Two backends can share a cache when their layouts are equal.

    name: a word for humans and for equality ("token_last", "token_major").
    key_shape, value_shape: dimension names out of "block", "head", "token", "dim", in memory order, contiguous.
    block_sizes: the block sizes (tokens) it accepts.
    """

    name: str
    key_shape: tuple[str, ...]
    value_shape: tuple[str, ...]
    block_sizes: tuple[int, ...]

    def shapes(self, spec: CacheSpec, num_blocks: int, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The key and value tensor shapes of one layer with `num_blocks` blocks (the null block included)."""
        sizes = {"block": num_blocks, "head": spec.num_kv_heads, "token": block_size}
        key = tuple({**sizes, "dim": spec.head_dim_k}[d] for d in self.key_shape)
        value = tuple({**sizes, "dim": spec.head_dim_v}[d] for d in self.value_shape)
        return key, value

    def views(self, cache: LayerCache) -> LayerCache:
        """One layer's keys and values seen as [block, token, head, dim], whatever the order in memory."""
        wanted = ("block", "token", "head", "dim")
        key, value = cache
        return (
            key.permute([self.key_shape.index(name) for name in wanted]),
            value.permute([self.value_shape.index(name) for name in wanted]),
        )


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. `head_sizes` empty: any. `graph_capture`: "none", "uniform_decode" or "any".

    dtypes: of queries, with a cache in the same one. fp8_cache: also a cache in float8_e4m3fn or float8_e5m2, whose
    elements are the values themselves (their scale is 1)."""

    dtypes: tuple[str, ...]
    head_sizes: tuple[int, ...] = ()
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    non_causal: bool = False
    graph_capture: Literal["none", "uniform_decode", "any"] = "none"
    alibi: bool = False
    fp8_cache: bool = False


@dataclass(slots=True)
class BatchGeometry:
    """Where each token of a step stands. Set by the runner before `prepare`; buffers seen by a captured graph are persistent
    and updated in place, so keep views, not copies.

    On the device:
    query_start_loc: int32 [R + 1], first token of each request in the flat batch, ascending, last entry = num_tokens.
    seq_lens: int32 [R], context length after this step's tokens.
    block_table: int32 [R, max_blocks], padded with the null block 0.
    slot_mapping: int64 [T], flat cache slot (block * block_size + offset) that each token's KV goes to; -1 writes nothing.
    On the host:
    max_query_len, max_seq_len: largest values of the step (upper bounds).
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_tokens: int
    num_requests: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    causal: bool = True


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The constants of one attention layer. index: the layer's place in the model, for its cache.

    The weight of a key is the softmax of scale * q.k, then soft_cap * tanh(score / soft_cap), then + slope * (key position -
    query position). sinks [H], floating point: a score for each head that takes part in the softmax and has no value.
    alibi_slopes: float32 [H]. Both lie on the worker's device and are left out of comparisons.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)
    alibi_slopes: Tensor | None = field(default=None, compare=False)


# One layer's cache: the key tensor and the value tensor, in the backend's KVLayout.
LayerCache = tuple["Tensor", "Tensor"]


class AttentionBackend(ABC):
    """One backend serves one cache group. It holds no per-request state; `prepare` sets what `forward` needs for a step."""

    layout: KVLayout
    capabilities: Capabilities

    @abstractmethod
    def prepare(self, geometry: BatchGeometry) -> None:
        """Once a step, before the first layer. May keep `geometry` until the next `prepare`."""

    @abstractmethod
    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None:
        """Stores key [T, KVH, head_dim_k] and value [T, KVH, head_dim_v] at the geometry's slot_mapping. Inputs may be
        strided views of a fused projection: a token's heads lie together, tokens are any stride apart. Not called where a
        kernel of the op `rope_write_kv` does it, in the places that `layout` says: it must do no more than that."""

    @abstractmethod
    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        """Attention of query [T, H, head_dim_k] over the cache, which holds this step's keys and values already.
        Returns [T, H, head_dim_v], contiguous, in query's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext(BuildContext):
    """The cache group to serve. `unavailable` gets `spec` None and no layers when no model is known.

    layers: those of the group, as far as the model tells: what windows and soft caps are asked for."""

    spec: CacheSpec | None = None
    block_size: int = 16
    layers: tuple[AttentionLayer, ...] = ()
