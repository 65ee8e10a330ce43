"""Rotation and cache write on a CPU, for a cache of any dtype."""

from __future__ import annotations

import torch

from hotswap.core.layers import reference
from hotswap.core.layers.jit.native import DTYPES
from hotswap.core.layers.jit.rope_write_kv import rope_write_kv as write_native
from hotswap.core.layers.jit.rope_write_kv import rotary_embedding

__all__ = ["rope_write_kv", "rotary_embedding"]


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The op of that name in contracts/kernels.py. There is vector code for caches in float32 and bfloat16; into others
    torch writes what was rotated, slowly."""
    if keys.dtype in DTYPES and values.dtype is keys.dtype:
        write_native(q, k, v, positions, cos_sin, keys, values, slot_mapping)
        return
    if cos_sin is not None:
        rotary_embedding(q, k, positions, cos_sin)
    reference.rope_write_kv(q, k, v, positions, None, keys, values, slot_mapping)
