"""One function for each FlashAttention: our step in its words.

All align a request's queries with the end of its context, count windows from the query on both sides, without the query itself,
and take int32 lengths. Arguments go by name: their order changes between releases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hotswap.core.contracts.attention import AttentionLayer, BatchGeometry, LayerCache


@dataclass(frozen=True, slots=True)
class Step:
    """What a call needs of a step, trimmed to its requests.

    starts: int32 [R + 1]. seq_lens: int32 [R]. table: int32 [R, max_blocks]. key_starts: int32 [R + 1], `seq_lens` summed up;
    for version 2 alone.
    """

    geometry: BatchGeometry
    starts: Tensor
    seq_lens: Tensor
    table: Tensor
    key_starts: Tensor | None = None


Call = Callable[[Tensor, LayerCache, AttentionLayer, Step], Tensor]  # -> [T, H, D]


def _window(layer: AttentionLayer, causal: bool, unlimited: int | None) -> tuple[int | None, int | None]:
    """Keys seen before and after the query's own."""
    if layer.window is None:
        return unlimited, unlimited
    return layer.window - 1, 0 if causal else unlimited


def version_2() -> Call:
    from flash_attn import flash_attn_varlen_func

    def call(query: Tensor, cache: LayerCache, layer: AttentionLayer, step: Step) -> Tensor:
        longest = step.geometry.max_query_len
        if longest == 1 and len(query) != step.geometry.num_requests:
            longest = 2  # for 1 it takes row r for request r's and the rows for as many as the requests
        out: Tensor = flash_attn_varlen_func(
            q=query,
            k=cache[0],
            v=cache[1],
            cu_seqlens_q=step.starts,
            cu_seqlens_k=step.key_starts,
            max_seqlen_q=longest,
            max_seqlen_k=step.geometry.max_seq_len,
            softmax_scale=layer.scale,
            causal=step.geometry.causal,
            window_size=_window(layer, step.geometry.causal, -1),
            softcap=layer.soft_cap or 0.0,
            block_table=step.table,
        )
        return out

    return call


def version_3() -> Call:
    from flash_attn_interface import flash_attn_with_kvcache

    def call(query: Tensor, cache: LayerCache, layer: AttentionLayer, step: Step) -> Tensor:
        out: Tensor = flash_attn_with_kvcache(
            q=query,
            k_cache=cache[0],
            v_cache=cache[1],
            cache_seqlens=step.seq_lens,
            page_table=step.table,
            cu_seqlens_q=step.starts,
            max_seqlen_q=step.geometry.max_query_len,
            softmax_scale=layer.scale,
            causal=step.geometry.causal,
            window_size=_window(layer, step.geometry.causal, -1),
            softcap=layer.soft_cap or 0.0,
        )
        return out

    return call


def version_4() -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    def call(query: Tensor, cache: LayerCache, layer: AttentionLayer, step: Step) -> Tensor:
        out = flash_attn_varlen_func(
            q=query,
            k=cache[0],
            v=cache[1],
            cu_seqlens_q=step.starts,
            seqused_k=step.seq_lens,
            max_seqlen_q=step.geometry.max_query_len,
            max_seqlen_k=step.geometry.max_seq_len,
            page_table=step.table,
            softmax_scale=layer.scale,
            causal=step.geometry.causal,
            window_size=_window(layer, step.geometry.causal, None),
            softcap=layer.soft_cap or 0.0,
            num_splits=1,  # it refuses others on compute capability 9.0
        )
        attended: Tensor = out[0] if isinstance(out, tuple) else out  # with the scores' logarithms, or None for them
        return attended

    return call


CALLS: dict[int, Callable[[], Call]] = {2: version_2, 3: version_3, 4: version_4}
