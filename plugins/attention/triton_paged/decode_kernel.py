"""Decode: requests with few new tokens over long contexts, bound by reading the cache once.

A program takes the query heads of one KV head and a few tokens as the rows of one small matrix, so that each key is
read once for all of them, and a part ("split") of the context's tiles. Where a request has several splits, each leaves
its sums behind and `merge_kernel` puts them together. How many splits a request has is decided on the device, from its
own context alone; a program whose split is beyond them ends at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_loop import LOG2E, attend_to_tiles


@triton.jit
def split_of(first_tile, last_tile, num_splits, min_tiles):  # type: ignore[no-untyped-def]
    """(splits in use, tiles of each): at most num_splits, none smaller than min_tiles unless it is the last."""
    tiles = tl.maximum(last_tile - first_tile, 1)
    wanted = tl.minimum(num_splits, (tiles + min_tiles - 1) // min_tiles)
    size = (tiles + wanted - 1) // wanted
    return (tiles + size - 1) // size, size


@triton.jit
def tiles_of(length, queries, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """(first key, first tile, end of tiles) that the last `queries` tokens of a context may see. WINDOW: 0 for none."""
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(length - queries - WINDOW + 1, 0)
    return first_key, first_key // BLOCK_N, (length + BLOCK_N - 1) // BLOCK_N


@triton.jit(
    do_not_specialize=[
        "starts_ptr",
        "lengths_ptr",
        "table_ptr",
        "table_stride",
        "num_splits",
        "min_tiles",
        "partial_rows",
    ]
)
def decode_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    partial_ptr,
    stats_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    starts_ptr,
    lengths_ptr,
    table_ptr,
    sinks_ptr,
    slopes_ptr,
    table_stride,
    num_splits,
    min_tiles,
    partial_rows,
    scale,
    cap_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKEN_PARTS: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    ROW_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    PAGE: tl.constexpr,
    QUERY_TOKEN: tl.constexpr,
    QUERY_HEAD: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (KV heads * HEAD_PARTS, requests, splits * TOKEN_PARTS). Rows: TOKENS tokens of HEADS heads each, HEADS of the
    GROUP query heads of a KV head. Serves requests with 1 .. MAX_TOKENS new tokens. partial [splits, partial_rows, H,
    DIM_V], stats [splits, partial_rows, H, 2] float32: sums, and (total, peak), of the row request * ROW_TOKENS + token."""
    kv_head = tl.program_id(0) // HEAD_PARTS
    first_head = tl.program_id(0) % HEAD_PARTS * HEADS
    request = tl.program_id(1)
    split = tl.program_id(2) // TOKEN_PARTS
    first_token = tl.program_id(2) % TOKEN_PARTS * TOKENS
    # Written before the embedding, which is no dependent launch: they may be read before the wait.
    start = tl.load(starts_ptr + request)
    queries = tl.load(starts_ptr + request + 1) - start
    length = tl.load(lengths_ptr + request)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (queries > MAX_TOKENS) | (first_token >= queries):
        return
    first_key, first_tile, last_tile = tiles_of(length, queries, BLOCK_N, WINDOW)
    splits = 1
    if SPLIT:
        splits, size = split_of(first_tile, last_tile, num_splits, min_tiles)
        if split >= splits:
            return
        first_tile += split * size
        last_tile = tl.minimum(first_tile + size, last_tile)

    rows = tl.arange(0, BLOCK_M)
    token = first_token + rows // HEADS
    in_group = first_head + rows % HEADS
    valid = (rows < TOKENS * HEADS) & (token < queries) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    dims = tl.arange(0, BLOCK_DK)
    query = tl.load(
        query_ptr + (start + token).to(tl.int64)[:, None] * QUERY_TOKEN + head[:, None] * QUERY_HEAD + dims[None, :],
        mask=valid[:, None] & (dims < DIM_K)[None, :],
        other=0.0,
    )
    position = length - queries + token
    limit = tl.minimum(position + 1, length) if CAUSAL else rows * 0 + length
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    if SINKS:  # noqa: SIM102 - decided when compiling, then on the device
        if split == 0:
            peak = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
    slope = peak
    if ALIBI:
        slope = tl.load(slopes_ptr + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
    acc, total, peak = attend_to_tiles(
        tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32),
        total,
        peak,
        query,
        key_ptr + kv_head * KEY_HEAD,
        value_ptr + kv_head * VALUE_HEAD,
        table_ptr + request.to(tl.int64) * table_stride,
        first_tile,
        last_tile,
        first_key,
        length,
        position - WINDOW + 1,
        limit,
        position,
        slope,
        scale,
        cap_scale,
        BLOCK_N,
        BLOCK_DK,
        BLOCK_DV,
        DIM_K,
        DIM_V,
        PAGE,
        KEY_BLOCK,
        KEY_TOKEN,
        VALUE_BLOCK,
        VALUE_TOKEN,
        WINDOW > 0,
        SOFT_CAP,
        ALIBI,
        True,  # a mask is free here
        UPCAST,
    )
    dims_v = tl.arange(0, BLOCK_DV)
    written = valid[:, None] & (dims_v < DIM_V)[None, :]
    if splits == 1:
        at = ((start + token).to(tl.int64) * NUM_HEADS + head) * DIM_V
        tl.store(
            out_ptr + at[:, None] + dims_v[None, :], acc / tl.where(total == 0.0, 1.0, total)[:, None], mask=written
        )
    elif SPLIT:
        row = split.to(tl.int64) * partial_rows + request * ROW_TOKENS + token
        at = row * NUM_HEADS + head
        tl.store(partial_ptr + at[:, None] * DIM_V + dims_v[None, :], acc, mask=written)
        tl.store(stats_ptr + at * 2, total, mask=valid)
        tl.store(stats_ptr + at * 2 + 1, peak, mask=valid)


@triton.jit(
    do_not_specialize=["starts_ptr", "lengths_ptr", "num_splits", "min_tiles", "partial_rows"],
)
def merge_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    partial_ptr,
    stats_ptr,
    starts_ptr,
    lengths_ptr,
    num_splits,
    min_tiles,
    partial_rows,
    NUM_HEADS: tl.constexpr,
    ROW_TOKENS: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DIM_V: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (H, requests * ROW_TOKENS): the splits of one row of one head, in order. MAX_SPLITS: a power of two."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    request = row // ROW_TOKENS
    token = row % ROW_TOKENS
    # Written before the embedding, which is no dependent launch: they may be read before the wait.
    start = tl.load(starts_ptr + request)
    queries = tl.load(starts_ptr + request + 1) - start
    length = tl.load(lengths_ptr + request)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (queries > MAX_TOKENS) | (token >= queries):
        return
    _, first_tile, last_tile = tiles_of(length, queries, BLOCK_N, WINDOW)
    splits, _ = split_of(first_tile, last_tile, num_splits, min_tiles)
    if splits == 1:
        return
    part = tl.arange(0, MAX_SPLITS)
    used = part < splits
    at = (part.to(tl.int64) * partial_rows + row) * NUM_HEADS + head
    total = tl.load(stats_ptr + at * 2, mask=used, other=0.0)
    peak = tl.load(stats_ptr + at * 2 + 1, mask=used, other=float("-inf"))
    dims = tl.arange(0, BLOCK_DV)
    sums = tl.load(
        partial_ptr + at[:, None] * DIM_V + dims[None, :], mask=used[:, None] & (dims < DIM_V)[None, :], other=0.0
    )
    weight = tl.exp2(peak - tl.max(peak, 0))
    merged = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out_ptr + ((start + token).to(tl.int64) * NUM_HEADS + head) * DIM_V + dims, merged, mask=dims < DIM_V)
