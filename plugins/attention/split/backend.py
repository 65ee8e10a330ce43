"""The backend that hands each step to one of two."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from hotswap.core.contracts import PluginError
from hotswap.core.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    BatchGeometry,
    Capabilities,
    KVLayout,
    LayerCache,
)

T = TypeVar("T")

Named = tuple[str, AttentionBackend]


class SplitAttention(AttentionBackend):
    """A step whose requests have one new token each goes to `decode`, any other to `prefill`, mixed ones included."""

    def __init__(self, prefill: Named, decode: Named, block_size: int) -> None:
        """Raises PluginError when the two cannot share a cache."""
        self._prefill, self._decode = prefill[1], decode[1]
        self._active = self._prefill
        self.layout = _shared_layout(prefill, decode, block_size)
        self.capabilities = _shared_capabilities(self._prefill.capabilities, self._decode.capabilities)

    def prepare(self, geometry: BatchGeometry) -> None:
        self._active = self._decode if geometry.max_query_len == 1 else self._prefill
        self._active.prepare(geometry)

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None:
        self._active.write_kv(key, value, cache)

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        return self._active.forward(query, cache, layer)


def _shared_layout(prefill: Named, decode: Named, block_size: int) -> KVLayout:
    one, other = prefill[1].layout, decode[1].layout
    if (one.name, one.key_shape, one.value_shape) != (other.name, other.key_shape, other.value_shape):
        raise PluginError(
            f"attention 'split': {prefill[0]} lays out the cache as {_described(one)}, {decode[0]} as {_described(other)}; "
            "name two backends with one layout"
        )
    for name, backend in (prefill, decode):
        sizes = backend.layout.block_sizes
        if sizes and block_size not in sizes:
            raise PluginError(f"attention 'split': {name} takes blocks of {_listed(sizes)} tokens, not {block_size}")
    return KVLayout(one.name, one.key_shape, one.value_shape, _both(one.block_sizes, other.block_sizes))


def _shared_capabilities(prefill: Capabilities, decode: Capabilities) -> Capabilities:
    """What both can do."""
    graphs = decode.graph_capture
    if graphs == "any" and prefill.graph_capture != "any":
        graphs = "uniform_decode"  # these steps are all of `decode`'s
    return Capabilities(
        dtypes=_both(prefill.dtypes, decode.dtypes),
        head_sizes=_both(prefill.head_sizes, decode.head_sizes),
        window=prefill.window and decode.window,
        soft_cap=prefill.soft_cap and decode.soft_cap,
        sinks=prefill.sinks and decode.sinks,
        non_causal=prefill.non_causal and decode.non_causal,
        graph_capture=graphs,
        alibi=prefill.alibi and decode.alibi,
        fp8_cache=prefill.fp8_cache and decode.fp8_cache,
    )


def _both(one: tuple[T, ...], other: tuple[T, ...]) -> tuple[T, ...]:
    """The values that both have, where an empty tuple stands for all."""
    return tuple(value for value in one if value in other) if one and other else one or other


def _described(layout: KVLayout) -> str:
    shapes = [", ".join(shape) for shape in (layout.key_shape, layout.value_shape)]
    return f"{layout.name} (keys [{shapes[0]}], values [{shapes[1]}])"


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:8])) + (", ..." if len(sizes) > 8 else "")
