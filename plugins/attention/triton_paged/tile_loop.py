"""What both kernels do with a tile of keys: read it through the block table, score it, fold it into the running sums."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def matrix_product(a, b, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """a [M, K] @ b [K, N] in float32. UPCAST: the operands are widened first, for Triton's interpreter, whose products
    of bfloat16 are wrong. "ieee": float32 operands are never rounded to tf32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_rows(  # type: ignore[no-untyped-def]
    at, read, dims, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """A tile of keys or values, [N, BLOCK]: of the rows in `read` [N], or of all of them; zeros beyond DIM."""
    if MASKED:
        if BLOCK == DIM:
            rows = tl.load(at, mask=read[:, None], other=0.0)
        else:
            rows = tl.load(at, mask=read[:, None] & (dims < DIM)[None, :], other=0.0)
    elif BLOCK == DIM:
        rows = tl.load(at)
    else:
        rows = tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    return rows


@triton.jit
def attend_to_tiles(  # type: ignore[no-untyped-def]
    acc,
    total,
    peak,
    query,
    key_ptr,
    value_ptr,
    table_ptr,
    first_tile,
    last_tile,
    first_key,
    last_key,
    lowest,
    limit,
    position,
    slope,
    scale,
    cap_scale,
    BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Online softmax of M query rows over tiles first_tile .. last_tile - 1 of BLOCK_N keys each.

    acc [M, BLOCK_DV], total [M], peak [M] (base 2): the state, returned. key_ptr, value_ptr: of the KV head. table_ptr: of
    the request. Keys first_key .. last_key - 1 are seen by some row; the others are not read, as they may be NaN. lowest,
    limit [M]: the keys that a row sees, limit excluded. MASKED False: every row sees all keys of these tiles. scale: of the
    scores, times log2(e); with a soft cap the scale over the cap, and cap_scale the cap times log2(e).
    position [M], slope [M]: with ALIBI, slope times (key - position) is added, in base 2.
    Strides: elements from block to block and token to token.

    What a tile adds has the same bits with MASKED and without, as which of both a key meets depends on where a chunk begins:
    products are fused with sums by `fma` here, not where the compiler finds that it can, which a mask in between prevents.
    """
    dims_k = tl.arange(0, BLOCK_DK)
    dims_v = tl.arange(0, BLOCK_DV)
    columns = tl.arange(0, BLOCK_N)
    keys = first_tile * BLOCK_N + columns
    next_block = tl.load(table_ptr + keys // PAGE, mask=(keys >= first_key) & (keys < last_key), other=0)
    for tile in range(first_tile, last_tile):
        keys = tile * BLOCK_N + columns
        read = (keys >= first_key) & (keys < last_key) if MASKED else None
        # Blocks are looked up a tile ahead: the copies of keys and values then wait for nothing.
        block = next_block.to(tl.int64)
        later = keys + BLOCK_N
        next_block = tl.load(table_ptr + later // PAGE, mask=later < last_key, other=0)
        inside = keys % PAGE
        key_rows = block * KEY_BLOCK + inside * KEY_TOKEN
        value_rows = block * VALUE_BLOCK + inside * VALUE_TOKEN
        key = load_rows(key_ptr + key_rows[:, None] + dims_k[None, :], read, dims_k, DIM_K, BLOCK_DK, MASKED)
        scores = matrix_product(query, tl.trans(key.to(query.dtype)), UPCAST)
        if SOFT_CAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both infinities.
            scores = 1.0 - 2.0 / (tl.exp2(scores * (scale * 2.0 * LOG2E)) + 1.0)
        factor = cap_scale if SOFT_CAP else scale
        if ALIBI:
            distance = (keys[None, :] - position[:, None]).to(tl.float32)
            scores = tl.fma(scores, factor, slope[:, None] * distance)
        if MASKED:
            seen = keys[None, :] < limit[:, None]
            if WINDOW:
                seen = seen & (keys[None, :] >= lowest[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.max(scores, 1)
        if not ALIBI:
            top = top * factor
        new_peak = tl.maximum(peak, top)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen nothing yet
        if ALIBI:
            weights = tl.exp2(scores - base[:, None])
        else:
            weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        value = load_rows(value_ptr + value_rows[:, None] + dims_v[None, :], read, dims_v, DIM_V, BLOCK_DV, MASKED)
        acc = weighted_sum(weights.to(query.dtype), value.to(query.dtype), acc, UPCAST)
        peak = new_peak
    return acc, total, peak


@triton.jit
def weighted_sum(weights, value, acc, UPCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + weights @ value, in float32."""
    if UPCAST:
        weights = weights.to(tl.float32)
        value = value.to(tl.float32)
    return tl.dot(weights, value, acc, input_precision="ieee")
