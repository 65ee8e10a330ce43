"""What the layers of a model meet during a step: attention over the paged cache of their group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..contracts.attention import AttentionBackend, AttentionLayer, BatchGeometry, LayerCache
from ..layers import reference
from ..layers.ops import OpTable
from .kv_cache import CacheGroup


@dataclass(frozen=True, slots=True)
class GroupCache:
    """A cache group with the backend that serves it."""

    group: CacheGroup
    backend: AttentionBackend


@dataclass(slots=True, eq=False)
class _Layer:
    """group: its number. views: the cache as [block, token, head, dim]."""

    backend: AttentionBackend
    group: int
    cache: LayerCache
    views: LayerCache


class StepContext:
    """The ForwardContext of a step: sends each layer's attention to its group's backend and cache.

    Rotation and cache write are one kernel where one was chosen that does both, else two.
    """

    def __init__(self, groups: Sequence[GroupCache], caches: dict[int, LayerCache], ops: OpTable) -> None:
        self._groups = groups
        self._rope = ops.rope
        self._fused: Callable[..., None] | None = ops.rope_write_kv
        if ops.rope_write_kv is reference.rope_write_kv:
            self._fused = None
        self._slot_mappings: tuple[Tensor, ...] = ()
        self._layers = {
            layer: _Layer(served.backend, number, caches[layer], served.backend.layout.views(caches[layer]))
            for number, served in enumerate(groups)
            for layer in served.group.layers
        }

    def prepare(self, geometries: Sequence[BatchGeometry]) -> None:
        self._slot_mappings = tuple(geometry.slot_mapping for geometry in geometries)
        for served, geometry in zip(self._groups, geometries, strict=True):
            served.backend.prepare(geometry)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor | None = None,
        cos_sin: Tensor | None = None,
    ) -> Tensor:
        found = self._layers[layer.index]
        if self._fused is not None and positions is not None:
            keys, values = found.views
            self._fused(query, key, value, positions, cos_sin, keys, values, self._slot_mappings[found.group])
        else:
            if cos_sin is not None and positions is not None:
                self._rope(query, key, positions, cos_sin)
            found.backend.write_kv(key, value, found.cache)
        return found.backend.forward(query, found.cache, layer)
