"""The paged KV cache of one layer, as CPU kernels read and write it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .native import dtype_name


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Checked once, used by every step: tensors, addresses and strides (in elements) of a layer's cache.

    key_cache [blocks, KVH, D, block_size] (the token is the inner axis, so that scores vectorise) and
    value_cache [blocks, KVH, block_size, D], float32 or bfloat16. Only blocks may be strided.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    dtype: str
    kv_heads: int
    d: int
    block_size: int
    key_address: int
    value_address: int
    key_block: int
    value_block: int

    @classmethod
    def of(cls, key_cache: torch.Tensor, value_cache: torch.Tensor) -> PagedCache:
        """Raises ValueError or TypeError, with what is expected, if the tensors are no such cache."""
        blocks, kv_heads, d, block_size = key_cache.shape
        if value_cache.shape != (blocks, kv_heads, block_size, d):
            raise ValueError(
                "a KV cache is [blocks, kv_heads, D, block_size] for keys and [blocks, kv_heads, block_size, D] for "
                f"values, not {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
            )
        inner = d * block_size
        if key_cache.stride()[1:] != (inner, block_size, 1) or value_cache.stride()[1:] != (inner, d, 1):
            raise ValueError(
                f"blocks of a KV cache must be contiguous, not of strides {key_cache.stride()}, {value_cache.stride()}"
            )
        if key_cache.dtype is not value_cache.dtype:
            raise TypeError(f"keys and values must be cached in one dtype, not {key_cache.dtype}, {value_cache.dtype}")
        return cls(
            key_cache,
            value_cache,
            dtype_name("KV cache", key_cache),
            kv_heads,
            d,
            block_size,
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            key_cache.stride(0),
            value_cache.stride(0),
        )
