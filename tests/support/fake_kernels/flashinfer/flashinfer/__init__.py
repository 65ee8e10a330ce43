"""A stand-in for FlashInfer: its wrapper, its checks, plain torch."""

from __future__ import annotations

import torch
from dense_pages import attend_pages
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        for lengths in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            assert lengths.dtype == torch.int32 and lengths.device.type == "cpu"
        assert paged_kv_indices.dtype == torch.int32 and len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert int(paged_kv_last_page_len.min()) >= 1 and int(paged_kv_last_page_len.max()) <= page_size
        assert sm_scale is not None and kv_data_type is not None
        pages = paged_kv_indptr.diff()
        self._seq_lens = (pages - 1) * page_size + paged_kv_last_page_len
        self._table = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for request, count in enumerate(pages.tolist()):
            first = int(paged_kv_indptr[request])
            self._table[request, :count] = paged_kv_indices[first : first + count]
        self._starts, self._sizes = qo_indptr, (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._causal, self._scale, self._left, self._soft_cap = causal, sm_scale, window_left, logits_soft_cap or 0.0
        self._dtypes = q_data_type, kv_data_type

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert (q.dtype, keys.dtype) == self._dtypes
        assert (q.shape[1], keys.shape[2], keys.shape[3], keys.shape[1]) == self._sizes
        assert q.is_contiguous() and len(q) == int(self._starts[-1])
        return attend_pages(
            q,
            keys,
            values,
            self._starts,
            self._seq_lens,
            self._table,
            scale=self._scale,
            causal=self._causal,
            left=self._left,
            right=-1,
            soft_cap=self._soft_cap,
        )
