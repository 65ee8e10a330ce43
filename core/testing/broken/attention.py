"""Attention backends with one fault each."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...contracts.attention import AttentionBackend, AttentionLayer, BatchGeometry, LayerCache
from ...contracts.provider import Provider
from ..templates.attention import MyAttention
from . import BrokenSample


class OneTokenShort(MyAttention):
    """Takes the context length before this step's last token."""

    def prepare(self, geometry: BatchGeometry) -> None:
        super().prepare(replace(geometry, seq_lens=(geometry.seq_lens - 1).clamp(min=1)))


class ReadsTheNullBlock(MyAttention):
    """Gathers a request's whole row of the table, and hides what is too much only by a weight of zero."""

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        output = super().forward(query, cache, layer)
        values = cache[1][self._step.block_table.long()]
        return output + 0.0 * values.sum()


class MixesUpHeadGroups(MyAttention):
    """Query head h reads KV head h modulo KVH instead of h divided by the size of a group."""

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        tokens, heads, kv_heads = len(query), layer.num_heads, layer.num_kv_heads
        grouped = query.view(tokens, heads // kv_heads, kv_heads, -1).transpose(1, 2).reshape(query.shape)
        output = super().forward(grouped, cache, layer)
        return output.view(tokens, kv_heads, heads // kv_heads, -1).transpose(1, 2).reshape(output.shape)


class DependsOnTheBatch(MyAttention):
    """The last bits change with the number of requests."""

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        return super().forward(query, cache, replace(layer, scale=layer.scale * (1 + 1e-7 * self._step.num_requests)))


class WritesPadding(MyAttention):
    """Slot -1 means nothing to it: padding goes to the last slot of the cache."""

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None:
        for new, stored in zip((key, value), cache, strict=True):
            stored.view(-1, *stored.shape[2:])[self._step.slot_mapping] = new.to(stored.dtype)


class WindowOneTooWide(MyAttention):
    """Sees w tokens before itself instead of w - 1."""

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        wide = layer if layer.window is None else replace(layer, window=layer.window + 1)
        return super().forward(query, cache, wide)


class AlwaysCausal(MyAttention):
    """Claims attention that is not causal, and does not look at the flag."""

    def prepare(self, geometry: BatchGeometry) -> None:
        super().prepare(replace(geometry, causal=True))


class ForgetsTheSoftCap(MyAttention):
    """Claims soft caps and leaves them out."""

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        return super().forward(query, cache, replace(layer, soft_cap=None))


class ForgetsTheSinks(MyAttention):
    """Claims attention sinks and leaves them out."""

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        return super().forward(query, cache, replace(layer, sinks=None))


class HalvesSomeSlopes(MyAttention):
    """Halves the slopes of the latter half of the heads."""

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        slopes = layer.alibi_slopes
        if slopes is not None:
            slopes = slopes.clone()
            slopes[len(slopes) // 2 :] /= 2
        return super().forward(query, cache, replace(layer, alibi_slopes=slopes))


def _sample(name: str, backend: type[AttentionBackend], caught_by: str) -> BrokenSample:
    provider = Provider(name=name, build=lambda context: backend(), summary=f"broken: {name}")
    return BrokenSample(name, provider, caught_by)


BROKEN: tuple[BrokenSample, ...] = (
    _sample("one_token_short", OneTokenShort, "equals_dense_attention"),
    _sample("reads_the_null_block", ReadsTheNullBlock, "equals_dense_attention"),
    _sample("mixes_up_head_groups", MixesUpHeadGroups, "equals_dense_attention"),
    _sample("depends_on_the_batch", DependsOnTheBatch, "rows_do_not_depend_on_batch_mates"),
    _sample("writes_padding", WritesPadding, "writes_exactly_the_slots"),
    _sample("window_one_too_wide", WindowOneTooWide, "windows"),
    _sample("always_causal", AlwaysCausal, "bidirectional"),
    _sample("forgets_the_soft_cap", ForgetsTheSoftCap, "soft_caps"),
    _sample("forgets_the_sinks", ForgetsTheSinks, "sinks"),
    _sample("halves_some_slopes", HalvesSomeSlopes, "alibi"),
)
