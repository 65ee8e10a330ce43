"""A stand-in for FlashAttention 3: its call, its checks, plain torch."""

from __future__ import annotations

import torch
from dense_pages import attend_pages
from torch import Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
) -> Tensor:
    assert cache_seqlens is not None and page_table is not None and cu_seqlens_q is not None
    assert max_seqlen_q is not None and softmax_scale is not None
    assert cu_seqlens_q.dtype == torch.int32 and int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    return attend_pages(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        cache_seqlens,
        page_table,
        scale=softmax_scale,
        causal=causal,
        left=window_size[0],
        right=window_size[1],
        soft_cap=softcap,
    )
