"""Prefill: requests with many new tokens, bound by arithmetic. Chunks and cached prefixes are the same thing: the first
keys lie in the cache already.

A program takes some tokens of one request, with all query heads of a KV head, as the rows of one large matrix. The
latest tokens, which see most, come first, so that what is left for the end of the launch is short.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_loop import LOG2E, attend_to_tiles


@triton.jit
def find_tile(  # type: ignore[no-untyped-def]
    starts_ptr, num_requests, index, TOKENS: tl.constexpr, MIN_TOKENS: tl.constexpr, MAX_REQUESTS: tl.constexpr
):
    """(request, tile within it, whether there is one) of the index-th tile of TOKENS tokens, counted from the last one of
    the last request. Requests with fewer than MIN_TOKENS new tokens have none. One look at all requests at once: a search
    by halves would wait for memory at each step. MAX_REQUESTS: a power of two, at least num_requests."""
    requests = tl.arange(0, MAX_REQUESTS)
    known = requests < num_requests
    starts = tl.load(starts_ptr + requests, mask=known, other=0)
    ends = tl.load(starts_ptr + requests + 1, mask=known, other=0)
    tiles = tl.where(ends - starts >= MIN_TOKENS, (ends - starts + TOKENS - 1) // TOKENS, 0)
    through = tl.cumsum(tiles, 0)
    wanted = tl.sum(tiles, 0) - 1 - index
    before = through <= wanted
    request = tl.sum(before.to(tl.int32), 0)
    return request, wanted - tl.sum(tl.where(before, tiles, 0), 0), wanted >= 0


@triton.jit(do_not_specialize=["starts_ptr", "lengths_ptr", "table_ptr", "table_stride", "num_requests"])
def prefill_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    starts_ptr,
    lengths_ptr,
    table_ptr,
    sinks_ptr,
    slopes_ptr,
    table_stride,
    num_requests,
    scale,
    cap_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
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
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (KV heads * HEAD_PARTS, an upper bound of the number of tiles). Rows: TOKENS tokens of HEADS heads each, HEADS of
    the GROUP query heads of a KV head."""
    kv_head = tl.program_id(0) // HEAD_PARTS
    first_head = tl.program_id(0) % HEAD_PARTS * HEADS
    # Written before the embedding, which is no dependent launch: they may be read before the wait.
    request, tile, found = find_tile(starts_ptr, num_requests, tl.program_id(1), TOKENS, MIN_TOKENS, MAX_REQUESTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if not found:
        return
    start = tl.load(starts_ptr + request)
    queries = tl.load(starts_ptr + request + 1) - start
    length = tl.load(lengths_ptr + request)

    rows = tl.arange(0, BLOCK_M)
    token = tile * TOKENS + rows // HEADS
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
    # What the first and the last token of the tile see; between them lies what every row sees.
    first_position = length - queries + tile * TOKENS
    last_position = tl.minimum(first_position + TOKENS, length) - 1
    first_key = 0
    last_key = length
    first_full = 0
    last_full = length // BLOCK_N
    limit = rows * 0 + length
    if CAUSAL:
        last_key = last_position + 1
        last_full = (first_position + 1) // BLOCK_N
        limit = tl.minimum(position + 1, length)
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)
        first_full = (tl.maximum(last_position - WINDOW + 1, 0) + BLOCK_N - 1) // BLOCK_N
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    if SINKS:
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
        first_key // BLOCK_N,
        (last_key + BLOCK_N - 1) // BLOCK_N,
        first_full,
        last_full,
        first_key,
        last_key,
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
        UPCAST,
    )
    dims_v = tl.arange(0, BLOCK_DV)
    at = ((start + token).to(tl.int64) * NUM_HEADS + head) * DIM_V
    tl.store(
        out_ptr + at[:, None] + dims_v[None, :],
        acc / tl.where(total == 0.0, 1.0, total)[:, None],  # 0: a row that is not valid
        mask=valid[:, None] & (dims_v < DIM_V)[None, :],
    )
