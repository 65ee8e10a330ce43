"""Stores the keys and values of new tokens in the cache."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots_ptr"])
def write_kernel(  # type: ignore[no-untyped-def]
    key_ptr,
    value_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    KV_HEADS: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_SOURCE: tl.constexpr,
    VALUE_SOURCE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T): one token. BLOCK_K, BLOCK_V: powers of two, at least KV_HEADS * DIM. KEY_SOURCE, VALUE_SOURCE: elements from
    token to token of the inputs. The other strides are the cache's."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    block = slot // PAGE
    inside = slot % PAGE
    at = tl.arange(0, BLOCK_K)
    key = tl.load(key_ptr + token * KEY_SOURCE + at, mask=at < KV_HEADS * DIM_K)
    target = block * KEY_BLOCK + inside * KEY_TOKEN + at // DIM_K * KEY_HEAD + at % DIM_K
    tl.store(keys_ptr + target, key.to(keys_ptr.dtype.element_ty), mask=at < KV_HEADS * DIM_K)
    at = tl.arange(0, BLOCK_V)
    value = tl.load(value_ptr + token * VALUE_SOURCE + at, mask=at < KV_HEADS * DIM_V)
    target = block * VALUE_BLOCK + inside * VALUE_TOKEN + at // DIM_V * VALUE_HEAD + at % DIM_V
    tl.store(values_ptr + target, value.to(values_ptr.dtype.element_ty), mask=at < KV_HEADS * DIM_V)
