"""The two kernels of a product x [T, K] times weight [N, K] transposed: on plain arithmetic for a few rows, on matrix
units for more.

Both read weights before they wait for the kernel that makes x (programmatic dependent launch, see launch.py): weights
never change, so their stream goes on while the small kernels between two products run. Each sum has one fixed order
that depends on the launch shape alone: neither on the other rows nor on which program ends first.
"""

# Triton reads the annotations of its functions and takes tl.constexpr only.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from .linear_shapes import Early

# What a dot program does before it waits for x; the values of its parameter EARLY.
REGISTERS, LINES, BULK = (
    tl.constexpr(Early.REGISTERS.value),
    tl.constexpr(Early.LINES.value),
    tl.constexpr(Early.BULK.value),
)
_LINE = tl.constexpr(128)  # bytes of a line of the level 2 cache


@triton.jit
def _wait(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _folded(tile, vector, sums):
    """sums [N, K / 8] plus the products of tile [N, K] and vector [K], eight neighbours together: a thread's own."""
    products = tile.to(tl.float32) * vector.to(tl.float32)[None, :]
    return sums + tl.sum(tl.reshape(products, (sums.shape[0], sums.shape[1], 8)), axis=2)


@triton.jit
def _add_rows(x, inside, tile, stride_x, tokens, sums_0, sums_1, sums_2, sums_3, ROWS: tl.constexpr):
    sums_0 = _folded(tile, tl.load(x, mask=inside, other=0.0), sums_0)
    if ROWS > 1:
        sums_1 = _folded(tile, tl.load(x + stride_x, mask=inside & (tokens > 1), other=0.0), sums_1)
    if ROWS > 2:
        sums_2 = _folded(tile, tl.load(x + 2 * stride_x, mask=inside & (tokens > 2), other=0.0), sums_2)
        sums_3 = _folded(tile, tl.load(x + 3 * stride_x, mask=inside & (tokens > 3), other=0.0), sums_3)
    return sums_0, sums_1, sums_2, sums_3


@triton.jit
def _write_row(out, sums, bias, n, inside, HAS_BIAS: tl.constexpr):
    total = tl.sum(sums, axis=1)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def matvec_kernel(
    x,
    w,
    bias,
    out,
    tokens,
    stride_x,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to ROWS = 1, 2 or 4 rows of x; a program takes BLOCK_N rows of w. ONE_BLOCK: K fits into BLOCK_K.

    A block of weights is always in flight while the one before it is used, the first one before x is there.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the last are its copies, computed and not stored: no mask in the loop.
    rows = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    tile = tl.load(rows, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    _wait(PDL)
    sums_0 = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    sums_1, sums_2, sums_3 = sums_0, sums_0, sums_0
    if ONE_BLOCK:
        sums_0, sums_1, sums_2, sums_3 = _add_rows(
            x + k, k < K, tile, stride_x, tokens, sums_0, sums_1, sums_2, sums_3, ROWS
        )
    else:
        for start in tl.range(0, K, BLOCK_K, num_stages=1):
            ahead = (start + BLOCK_K + k < K)[None, :]
            following = tl.load(rows + (start + BLOCK_K), mask=ahead, other=0.0, eviction_policy="evict_first")
            sums_0, sums_1, sums_2, sums_3 = _add_rows(
                x + start + k, start + k < K, tile, stride_x, tokens, sums_0, sums_1, sums_2, sums_3, ROWS
            )
            tile = following
    _write_row(out, sums_0, bias, n, n < N, HAS_BIAS)
    if ROWS > 1:
        _write_row(out + N, sums_1, bias, n, (n < N) & (tokens > 1), HAS_BIAS)
    if ROWS > 2:
        _write_row(out + 2 * N, sums_2, bias, n, (n < N) & (tokens > 2), HAS_BIAS)
        _write_row(out + 3 * N, sums_3, bias, n, (n < N) & (tokens > 3), HAS_BIAS)


@triton.jit
def _fetch_lines(rows, end, LINES_A_ROW: tl.constexpr):
    """Brings the first lines of each weight row into the level 2 cache. rows, end: pointers [N, 1]; nothing from `end`
    on is touched."""
    line = rows.to(tl.int64) + tl.arange(0, LINES_A_ROW)[None, :].to(tl.int64) * _LINE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [tl.minimum(line, end.to(tl.int64) - 2)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _fetch_bulk(rows, end, BYTES: tl.constexpr):
    """As `_fetch_lines`, one instruction a row. Rows must begin at multiples of 16 bytes."""
    length = tl.minimum((end.to(tl.int64) - rows.to(tl.int64)).to(tl.int32), BYTES) // 16 * 16
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [rows.to(tl.int64), length],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _product(tile, other, sums, W_FIRST: tl.constexpr, WIDE: tl.constexpr):
    """tile [N, K] of weights and other [T, K] into sums [N, T] if W_FIRST, else [T, N]."""
    if WIDE:
        tile, other = tile.to(tl.float32), other.to(tl.float32)
    if W_FIRST:
        sums = tl.dot(tile, tl.trans(other), sums, input_precision="ieee")
    else:
        sums = tl.dot(other, tl.trans(tile), sums, input_precision="ieee")
    return sums


@triton.jit
def _segment(
    rows,
    lines,
    here,
    begin,
    end,
    sums,
    BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    W_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums plus the products over the columns begin .. end, in so many blocks. rows, lines: pointers to column 0 of
    weights [N, 1] and of x [T, 1]; here [T, 1]: whether that row of x exists."""
    k = tl.arange(0, BLOCK_K)[None, :]
    if EARLY == REGISTERS:
        tile = tl.load(rows + begin + k, mask=begin + k < end, other=0.0, eviction_policy="evict_first")
        _wait(PDL)
        for block in tl.range(0, BLOCKS, num_stages=1):
            start = begin + block * BLOCK_K
            other = tl.load(lines + start + k, mask=here & (start + k < end), other=0.0)
            ahead = start + BLOCK_K + k
            following = tl.load(rows + ahead, mask=ahead < end, other=0.0, eviction_policy="evict_first")
            sums = _product(tile, other, sums, W_FIRST, WIDE)
            tile = following
    else:
        for block in range(BLOCKS):
            start = begin + block * BLOCK_K
            if EVEN_K:
                tile = tl.load(rows + start + k, eviction_policy="evict_first")
                other = tl.load(lines + start + k, mask=here, other=0.0)
            else:
                tile = tl.load(rows + start + k, mask=start + k < end, other=0.0, eviction_policy="evict_first")
                other = tl.load(lines + start + k, mask=here & (start + k < end), other=0.0)
            sums = _product(tile, other, sums, W_FIRST, WIDE)
    return sums


@triton.jit
def _write_tile(
    out,
    sums,
    bias,
    n,
    t,
    N,
    tokens,
    W_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    if W_FIRST:
        sums = tl.trans(sums)
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = out + t.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def dot_kernel(
    x,
    w,
    bias,
    out,
    partial,
    arrived,
    tokens,
    stride_x,
    N,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    W_FIRST: tl.constexpr,
    EARLY: tl.constexpr,
    EARLY_BYTES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of BLOCK_T rows of x by BLOCK_N rows of w.

    K is cut into SEGMENTS pieces of whole blocks, summed each for itself and then added in order. SPLIT_K is 1: this
    program does them all; or SEGMENTS: one each, by way of partial float32 [tiles, SEGMENTS, tile], and the program
    that arrives last at the tile's counter in `arrived` (zeros before and after) adds them. Both give the same bits.
    EVEN_K: segments are whole blocks and all of one length. EARLY_BYTES: of each weight row, with EARLY = LINES or BULK
    (K is a multiple of 8 then).
    """
    # Programs that share weights follow each other, so that these are read once.
    row_tiles = tl.cdiv(tokens, BLOCK_T)
    rows_tile, split = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles % SPLIT_K
    columns_tile = tl.program_id(0) // (row_tiles * SPLIT_K)
    n = columns_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    t = rows_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    BLOCKS: tl.constexpr = (K + BLOCK_K * SEGMENTS - 1) // (BLOCK_K * SEGMENTS)
    length: tl.constexpr = BLOCKS * BLOCK_K
    # Rows beyond the last are its copies, computed and not stored: no mask in the loop.
    rows = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    lines = x + t.to(tl.int64)[:, None] * stride_x
    here = (t < tokens)[:, None]
    if PDL and EARLY == LINES:
        _fetch_lines(rows + tl.minimum(split * length, K - 1), rows + K, EARLY_BYTES // _LINE)
    if PDL and EARLY == BULK:
        _fetch_bulk(rows + tl.minimum(split * length, K - 8), rows + K, EARLY_BYTES)
    if EARLY != REGISTERS:
        _wait(PDL)
    shape: tl.constexpr = (BLOCK_N, BLOCK_T) if W_FIRST else (BLOCK_T, BLOCK_N)
    sums = tl.zeros(shape, tl.float32)
    if SEGMENTS == SPLIT_K:
        begin = split * length
        end = tl.minimum(begin + length, K)
        sums = _segment(rows, lines, here, begin, end, sums, BLOCKS, BLOCK_K, EVEN_K, W_FIRST, EARLY, WIDE, PDL)
    else:
        for segment in range(SEGMENTS):
            begin = segment * length
            end = tl.minimum(begin + length, K)
            piece = tl.zeros(shape, tl.float32)
            sums += _segment(rows, lines, here, begin, end, piece, BLOCKS, BLOCK_K, EVEN_K, W_FIRST, EARLY, WIDE, PDL)
    if SPLIT_K == 1:
        _write_tile(out, sums, bias, n, t, N, tokens, W_FIRST, HAS_BIAS)
    else:
        tile = columns_tile * row_tiles + rows_tile
        place = tl.arange(0, shape[0])[:, None] * shape[1] + tl.arange(0, shape[1])[None, :]
        place += tile * (SPLIT_K * BLOCK_T * BLOCK_N)
        tl.store(partial + place + split * (BLOCK_T * BLOCK_N), sums, cache_modifier=".cg")
        tl.debug_barrier()  # every thread's part is stored before one of them counts
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            total = tl.zeros(shape, tl.float32)
            for piece in range(SPLIT_K):
                total += tl.load(partial + place + piece * (BLOCK_T * BLOCK_N), cache_modifier=".cg")
            _write_tile(out, total, bias, n, t, N, tokens, W_FIRST, HAS_BIAS)
            tl.store(arrived + tile, 0)
