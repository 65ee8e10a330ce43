"""A stand-in for FlashAttention 4: its call, its checks, plain torch."""

from __future__ import annotations

import torch
from dense_pages import attend_pages
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
) -> tuple[Tensor, Tensor | None]:
    assert cu_seqlens_q is not None and seqused_k is not None and page_table is not None and softmax_scale is not None
    assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
    assert num_splits == 1, "SplitKV not supported on SM 9.0"
    assert q.shape[2] % 16 == 0, "Paged KV does not support irregular head dim"
    assert max_seqlen_q is not None and int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert max_seqlen_k is not None and int(seqused_k.max()) <= max_seqlen_k
    assert cu_seqlens_q.dtype == torch.int32 and -1 not in window_size
    out = attend_pages(
        q,
        k,
        v,
        cu_seqlens_q,
        seqused_k,
        page_table,
        scale=softmax_scale,
        causal=causal,
        left=-1 if window_size[0] is None else window_size[0],
        right=-1 if window_size[1] is None else window_size[1],
        soft_cap=softcap,
    )
    return out, None
