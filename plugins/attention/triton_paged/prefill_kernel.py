"""Prefill: requests with many new tokens, bound by arithmetic. Chunks and cached prefixes are the same thing: the first
keys lie in the cache already.

A program takes some tokens of one request, with all query heads of a KV head, as the rows of one large matrix. The
latest tokens, which see most, come first, so that what is left for the end of the launch is short.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_loop import LOG2E, attend_to_tiles

# Columns of the list of tiles.
REQUEST = tl.constexpr(0)
FIRST_TOKEN = tl.constexpr(1)  # of the tile, counted from the request's first new one
START = tl.constexpr(2)  # of the request's new tokens in the batch
NEW_TOKENS = tl.constexpr(3)  # of the request; 0: there is no such tile
LENGTH = tl.constexpr(4)  # of the request's context
TILE_COLUMNS = tl.constexpr(8)  # a tile's row is one sector of memory


@triton.jit(do_not_specialize=["starts_ptr", "lengths_ptr", "num_requests"])
def list_tiles_kernel(  # type: ignore[no-untyped-def]
    tiles_ptr,
    starts_ptr,
    lengths_ptr,
    num_requests,
    TOKENS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: an upper bound of the number of tiles. tiles [grid, TILE_COLUMNS] int32: the tiles of TOKENS tokens of a step,
    from the last one of the last request on. Requests with fewer than MIN_TOKENS new tokens have none. One look at all
    requests at once: a search by halves would wait for memory at each step. MAX_REQUESTS: a power of two, at least
    num_requests."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    requests = tl.arange(0, MAX_REQUESTS)
    known = requests < num_requests
    starts = tl.load(starts_ptr + requests, mask=known, other=0)
    ends = tl.load(starts_ptr + requests + 1, mask=known, other=0)
    tiles = tl.where(ends - starts >= MIN_TOKENS, (ends - starts + TOKENS - 1) // TOKENS, 0)
    through = tl.cumsum(tiles, 0)
    wanted = tl.sum(tiles, 0) - 1 - tl.program_id(0)
    before = through <= wanted
    request = tl.sum(before.to(tl.int32), 0)
    row = tiles_ptr + tl.program_id(0) * TILE_COLUMNS
    if wanted < 0:
        tl.store(row + NEW_TOKENS, 0)
        return
    start = tl.load(starts_ptr + request)
    tl.store(row + REQUEST, request)
    tl.store(row + FIRST_TOKEN, (wanted - tl.sum(tl.where(before, tiles, 0), 0)) * TOKENS)
    tl.store(row + START, start)
    tl.store(row + NEW_TOKENS, tl.load(starts_ptr + request + 1) - start)
    tl.store(row + LENGTH, tl.load(lengths_ptr + request))


@triton.jit(do_not_specialize=["table_ptr", "table_stride"])
def prefill_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    tiles_ptr,
    table_ptr,
    sinks_ptr,
    slopes_ptr,
    table_stride,
    scale,
    cap_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
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
    """Grid (KV heads * HEAD_PARTS, rows of `tiles_ptr`, which `list_tiles_kernel` left). Rows: TOKENS tokens of HEADS heads
    each, HEADS of the GROUP query heads of a KV head."""
    kv_head = tl.program_id(0) // HEAD_PARTS
    first_head = tl.program_id(0) % HEAD_PARTS * HEADS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # All five on their way at once: how soon the first keys come is what short contexts take their time from.
    row = tiles_ptr + tl.program_id(1) * TILE_COLUMNS
    request = tl.load(row + REQUEST)
    first_token = tl.load(row + FIRST_TOKEN)
    start = tl.load(row + START)
    queries = tl.load(row + NEW_TOKENS)
    length = tl.load(row + LENGTH)
    if queries == 0:
        return

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
    # What the first and the last token of the tile see; between them lies what every row sees.
    first_position = length - queries + first_token
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
    acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
    table_row = table_ptr + request.to(tl.int64) * table_stride
    first_tile = first_key // BLOCK_N
    last_tile = (last_key + BLOCK_N - 1) // BLOCK_N
    # Three loops, so that the longest one, over what every row sees, goes without masks and branches.
    first_full = tl.minimum(tl.maximum(first_full, first_tile), last_tile)
    last_full = tl.maximum(first_full, last_full)
    if WINDOW > 0:
        acc, total, peak = attend_to_tiles(
            acc,
            total,
            peak,
            query,
            key_ptr + kv_head * KEY_HEAD,
            value_ptr + kv_head * VALUE_HEAD,
            table_row,
            first_tile,
            first_full,
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
            True,
            UPCAST,
        )
    acc, total, peak = attend_to_tiles(
        acc,
        total,
        peak,
        query,
        key_ptr + kv_head * KEY_HEAD,
        value_ptr + kv_head * VALUE_HEAD,
        table_row,
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
        False,
        UPCAST,
    )
    acc, total, peak = attend_to_tiles(
        acc,
        total,
        peak,
        query,
        key_ptr + kv_head * KEY_HEAD,
        value_ptr + kv_head * VALUE_HEAD,
        table_row,
        last_full,
        last_tile,
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
        True,
        UPCAST,
    )
    dims_v = tl.arange(0, BLOCK_DV)
    at = ((start + token).to(tl.int64) * NUM_HEADS + head) * DIM_V
    tl.store(
        out_ptr + at[:, None] + dims_v[None, :],
        acc / tl.where(total == 0.0, 1.0, total)[:, None],  # 0: a row that is not valid
        mask=valid[:, None] & (dims_v < DIM_V)[None, :],
    )
