"""The paged KV cache of one layer, as CPU kernels read and write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .native import dtype_name


class Places(NamedTuple):
    """Where a token's heads are written, in a cache of any layout. heads: (KV heads, size of a key, size of a value).
    keys, values: an address and the strides of block, token, head and dimension in elements."""

    dtype: str
    heads: tuple[int, int, int]
    block_size: int
    keys: tuple[int, ...]
    values: tuple[int, ...]


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
    places: Places

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
        dtype, keys, values = dtype_name("KV cache", key_cache), key_cache.data_ptr(), value_cache.data_ptr()
        key_block, value_block = key_cache.stride(0), value_cache.stride(0)
        places = Places(
            dtype,
            (kv_heads, d, d),
            block_size,
            (keys, key_block, 1, inner, block_size),
            (values, value_block, d, inner, 1),
        )
        return cls(key_cache, value_cache, dtype, kv_heads, d, block_size, keys, values, key_block, value_block, places)
