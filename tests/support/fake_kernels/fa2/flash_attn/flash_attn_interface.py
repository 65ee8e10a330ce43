from __future__ import annotations

import torch
from dense_pages import attend_pages
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert block_table is not None and softmax_scale is not None
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and int(cu_seqlens_k[0]) == 0
    assert cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous()
    seq_lens = cu_seqlens_k.diff()
    assert int(seq_lens.max()) <= max_seqlen_k and int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    if max_seqlen_q == 1 and q.shape[1] > k.shape[2] and window_size == (-1, -1):
        assert len(q) == len(seq_lens), "rows are taken for requests"
    return attend_pages(
        q,
        k,
        v,
        cu_seqlens_q,
        seq_lens,
        block_table,
        scale=softmax_scale,
        causal=causal and max_seqlen_q > 1,
        left=window_size[0],
        right=window_size[1],
        soft_cap=softcap,
    )
