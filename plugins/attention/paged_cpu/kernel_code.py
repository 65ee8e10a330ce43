"""Code generation for paged attention; `paged_attention` is the way to call it and explains the arithmetic.

Terms: a *row* is one (query token, query head); a *tile* is up to TILE_ROWS rows of one sequence and KV head; a *pass*
is up to PASS_ROWS rows of a tile whose sums fit the registers; a *chunk* is CHUNK consecutive tokens of the context,
counted from token 0; a *pair* is two vectors of consecutive tokens, in the order of `Buffer.load_pair`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from hotswap.core.layers.jit import Buffer, Function, Module, Target, Team, Val, exp, parallel_function, tanh, unpair
from hotswap.core.layers.jit.native import split_table

CHUNK = 128
PASS_ROWS = 6
TILE_ROWS = 8 * PASS_ROWS
_LOWEST = -3.4028234663852886e38
# Sums of a pass that takes several pairs (or column pairs) at once: enough to hide the latency of fma, without spills.
_SUMS = 8
# The most pairs that a pass takes at once.
_TOGETHER = 4
# Keys are prefetched so many pairs before they are used; addresses of pairs are known so far beyond the chunk.
_DISTANCE = 4
_AHEAD = _TOGETHER + _DISTANCE

PARAMS = [
    ("q", "ptr"),
    ("out", "ptr"),
    ("key_cache", "ptr"),
    ("value_cache", "ptr"),
    ("query_start", "ptr"),
    ("seq_lens", "ptr"),
    ("block_table", "ptr"),
    ("items", "ptr"),
    ("item_count", "i64"),
    ("kv_heads", "i64"),
    ("ldq", "i64"),
    ("ldo", "i64"),
    ("ldb", "i64"),
    ("key_block", "i64"),
    ("value_block", "i64"),
    ("causal", "i64"),
    ("window", "i64"),
    ("scale", "f32"),
    ("soft_cap", "f32"),
]
_PASS_PARAMS = [
    ("q", "ptr"),
    ("keys", "ptr"),
    ("values", "ptr"),
    ("scores", "ptr"),
    ("totals", "ptr"),
    ("state", "ptr"),
    ("bounds", "ptr"),
    ("chunk", "i64"),
    ("begin", "i64"),
    ("end", "i64"),
    ("soft_cap", "f32"),
]
_SOFTMAX_PARAMS = [
    ("scores", "ptr"),
    ("state", "ptr"),
    ("low", "i64"),
    ("limit", "i64"),
    ("first", "i64"),
    ("last", "i64"),
    ("soft_cap", "f32"),
]
# float32 of `state` per row: running maximum, running sum, and the factors of the last merge (old total, new chunk).
_MAXIMUM, _SUM, _OLD, _NEW, _STATE = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Shape:
    """What the code is specialised for; everything else is an argument."""

    d: int
    block_size: int
    group: int
    dtype: str
    cache_dtype: str

    def width(self, target: Target) -> int:
        """float32 lanes of a vector: at most 8, so that a block of 16 tokens is a whole pair."""
        return min(target.width, 8)

    def direct(self, target: Target) -> bool:
        """Whether pairs are read in place; other block sizes are first copied to float32 scratch, chunk by chunk."""
        return self.block_size % (2 * self.width(target)) == 0

    def source(self, target: Target) -> str:
        """The element type that passes read."""
        return self.cache_dtype if self.direct(target) else "f32"


class _Code:
    """Builds the functions of one module."""

    def __init__(self, target: Target, shape: Shape) -> None:
        self.shape = shape
        self.width = shape.width(target)
        self.pair = 2 * self.width
        self.direct = shape.direct(target)
        self.source = shape.source(target)
        self.key_stride = shape.block_size if self.direct else CHUNK
        self.score_stride = CHUNK + _TOGETHER * self.pair
        self.module = Module(
            f"paged_attention_{shape.d}_{shape.block_size}_{shape.group}_{shape.dtype}_{shape.cache_dtype}", target
        )
        self.softmax = self._softmax()
        # Tiles have a multiple of gcd(group, TILE_ROWS) rows, and so have passes.
        unit = math.gcd(shape.group, PASS_ROWS)
        self.passes = {rows: self._pass(rows) for rows in (1, 2, 3, 4, PASS_ROWS) if rows % unit == 0}

    def columns(self, fn: Function, emit: Callable[[Val, int], None]) -> None:
        """Emits `emit(index, lanes)` so that it covers the components of a head."""
        wide = self.shape.d - self.shape.d % self.width
        with fn.loop(0, wide, self.width) as index:
            emit(index, self.width)
        with fn.loop(wide, self.shape.d) as index:
            emit(index, 1)

    def _softmax(self) -> Function:
        """Turns the scores of one row and chunk (pairs first .. last) into weights, and merges maximum and sum."""
        fn = self.module.function("softmax", _SOFTMAX_PARAMS)
        scores, state = fn.buffer("scores", "f32"), fn.buffer("state", "f32")
        width, pair = self.width, self.pair
        first, last, low, limit = (fn.arg[name] for name in ("first", "last", "low", "limit"))
        cap = fn.arg["soft_cap"]
        with fn.when(cap.gt(0.0)):
            inverse = (1.0 / cap).splat(width)
            with fn.loop(first * pair, last * pair, width) as index:
                scores.store(tanh(scores.load(index, width) * inverse) * cap.splat(width), index)
        with fn.when(limit.lt(last * pair) | low.gt(first * pair)):
            lanes = unpair_indices(self.source, width)
            with fn.loop(first * pair, last * pair, pair) as index:
                for half in range(2):
                    token = index.to_i32().splat(width) + fn.int_vector(lanes[half])
                    seen = token.lt(limit.to_i32().splat(width)) & token.ge(low.to_i32().splat(width))
                    at = index + half * width
                    scores.store(seen.select(scores.load(at, width), float("-inf")), at)
        highest = [fn.var(fn.f32(0.0, width).type, _LOWEST) for _ in range(2)]
        with fn.loop(first * pair, last * pair, pair) as index:
            for half in range(2):
                highest[half].set(highest[half].get().maximum(scores.load(index + half * width, width)))
        maximum = fn.max_lanes(highest[0].get().maximum(highest[1].get()))
        sums = [fn.zeros(width) for _ in range(2)]
        with fn.loop(first * pair, last * pair, pair) as index:
            weights = [exp(scores.load(index + half * width, width) - maximum.splat(width)) for half in range(2)]
            for half in range(2):
                sums[half].set(sums[half].get() + weights[half])
            for half, weight in enumerate(unpair(self.source, *weights)):
                scores.store(weight, index + half * width)
        chunk_sum = fn.sum_lanes(sums[0].get() + sums[1].get())
        before = state.load(_MAXIMUM)
        merged = before.maximum(maximum)
        old, new = exp(before - merged), exp(maximum - merged)
        state.store(merged, _MAXIMUM)
        state.store(fn.fma(state.load(_SUM), old, chunk_sum * new), _SUM)
        state.store(old, _OLD)
        state.store(new, _NEW)
        fn.finish()
        return fn

    def _pass(self, rows: int) -> Function:
        """One chunk for `rows` rows: scores, softmax, weighted sum of the values merged into `totals`."""
        fn = self.module.function(f"pass_{rows}", _PASS_PARAMS)
        first = fn.arg["begin"] // self.pair
        last = (fn.arg["end"] + (self.pair - 1)) // self.pair
        self._scores(fn, rows, first, last)
        bounds, chunk = fn.buffer("bounds", "i64"), fn.arg["chunk"]
        scores, state = fn.buffer("scores", "f32"), fn.buffer("state", "f32")
        with fn.loop(0, rows) as row:
            fn.call(
                self.softmax,
                scores.at(row * self.score_stride).pointer,
                state.at(row * _STATE).pointer,
                bounds.load(row * 2) - chunk,
                bounds.load(row * 2 + 1) - chunk,
                first,
                last,
                fn.arg["soft_cap"],
            )
        self._values(fn, rows, first, last)
        fn.finish()
        return fn

    def _scores(self, fn: Function, rows: int, first: Val, last: Val) -> None:
        d, width, pair = self.shape.d, self.width, self.pair
        together = max(1, min(_TOGETHER, _SUMS // (2 * rows)))
        q, scores = fn.buffer("q", "f32"), fn.buffer("scores", "f32")
        with fn.loop(first, last, together) as index:
            # Beyond the last pair the last one is computed again, into slots that nobody reads.
            keys = [
                fn.buffer("keys", "ptr").load_buffer((index + i).minimum(last - 1), self.source)
                for i in range(together)
            ]
            sums = [[(fn.zeros(width), fn.zeros(width)) for _ in range(together)] for _ in range(rows)]
            later = [
                fn.buffer("keys", "ptr").load_buffer(index + (i + _DISTANCE), self.source) for i in range(together)
            ]
            later += [fn.buffer("values", "ptr").load_buffer(index + i, self.source) for i in range(together)]

            with fn.loop(0, d) as component:
                if self.direct:
                    # A pair of keys or values of one head is contiguous, but the next one is anywhere in memory.
                    for buffer in later:
                        buffer.prefetch(component * pair)
                loaded = [k.load_pair(component * self.key_stride, width) for k in keys]
                for r in range(rows):
                    factor = q.load(component + r * d).splat(width)
                    for i in range(together):
                        for half in range(2):
                            total = sums[r][i][half]
                            total.set(fn.fma(factor, loaded[i][half], total.get()))
            for r in range(rows):
                for i in range(together):
                    for half in range(2):
                        at = (index + i) * pair + (r * self.score_stride + half * width)
                        scores.store(sums[r][i][half].get(), at)

    def _values(self, fn: Function, rows: int, first: Val, last: Val) -> None:
        """Column strips of the values, as many columns at once as sums fit the registers."""
        d, pair = self.shape.d, self.pair
        together = max(1, min(_TOGETHER, _SUMS // (2 * rows)))
        strips = d // (pair * together)
        if strips:
            with fn.loop(0, strips * pair * together, pair * together) as column:
                self._strip(fn, rows, first, last, column, [pair] * together)
        rest = d - strips * pair * together
        segments = [pair] * (rest // pair)
        rest %= pair
        lanes = self.width
        while rest:
            if rest >= lanes:
                segments.append(lanes)
                rest -= lanes
            lanes //= 2
        if segments:
            self._strip(fn, rows, first, last, fn.i64(strips * pair * together), segments)

    def _strip(self, fn: Function, rows: int, first: Val, last: Val, column: Val, segments: list[int]) -> None:
        """The columns of `segments`, from `column` on: a segment is a whole pair or one vector of fewer lanes."""
        d, width, pair = self.shape.d, self.width, self.pair
        weights, totals, state = (fn.buffer(name, "f32") for name in ("scores", "totals", "state"))
        pieces: list[tuple[int, int]] = []  # (offset, lanes) of each vector of sums
        offset = 0
        for size in segments:
            pieces += [(offset, width), (offset + width, width)] if size == pair else [(offset, size)]
            offset += size
        sums = [[fn.zeros(lanes) for _, lanes in pieces] for _ in range(rows)]
        begin, end = fn.arg["begin"], fn.arg["end"]
        with fn.loop(first, last) as index:
            values = fn.buffer("values", "ptr").load_buffer(index, self.source).at(column)
            start = (begin - index * pair).maximum(0)
            stop = (end - index * pair).minimum(pair)
            with fn.loop(start, stop) as token:
                row = values.at(token * d)
                loaded: list[Val] = []
                at = 0
                for size in segments:
                    loaded += row.load_pair(at, width) if size == pair else [row.load(at, size)]
                    at += size
                for r in range(rows):
                    weight = weights.load(index * pair + token + r * self.score_stride)
                    for total, value in zip(sums[r], loaded, strict=True):
                        total.set(fn.fma(weight.splat(value.lanes), value, total.get()))
        for r in range(rows):
            old, new = state.load(r * _STATE + _OLD), state.load(r * _STATE + _NEW)
            for (offset, lanes), total in zip(pieces, sums[r], strict=True):
                slot = totals.at(column + (r * d + offset))
                slot.store(fn.fma(slot.load(0, lanes), old.splat(lanes), total.get() * new.splat(lanes)))


def unpair_indices(dtype: str, width: int) -> tuple[list[int], list[int]]:
    """The element index of each lane of the two vectors that `load_pair` gives."""
    if dtype == "f32":
        return list(range(width)), list(range(width, 2 * width))
    return list(range(0, 2 * width, 2)), list(range(1, 2 * width, 2))


@dataclass
class _Tile:
    """One tile inside the driver: where it is and the scratch of the thread that computes it."""

    code: _Code
    team: Team
    seq: Val
    head: Val
    first_row: Val
    rows: Val
    query_start: Val
    query_len: Val
    seq_len: Val
    q: Buffer
    totals: Buffer
    state: Buffer
    bounds: Buffer
    scores: Buffer
    keys: Buffer
    values: Buffer
    key_copy: Buffer
    value_copy: Buffer

    def place(self, row: Val) -> tuple[Val, Val]:
        """(query token of the sequence, query head) of a row of the tile."""
        index, group = self.first_row + row, self.code.shape.group
        return index // group, self.head * group + index % group

    def start(self) -> None:
        """Copies the scaled queries, states which tokens each row sees, and clears the sums."""
        fn, arg, d = self.team.fn, self.team.arg, self.code.shape.d
        with fn.loop(0, self.rows) as row:
            token, head = self.place(row)
            source = self.team.buffer("q", self.code.shape.dtype).at((self.query_start + token) * arg["ldq"] + head * d)
            target, totals = self.q.at(row * d), self.totals.at(row * d)
            self.code.columns(fn, lambda at, n: target.store(source.load(at, n) * arg["scale"].splat(n), at))
            self.code.columns(fn, lambda at, n: totals.store(fn.f32(0.0, n), at))
            after = self.seq_len - self.query_len + token + 1
            window = arg["window"]
            self.bounds.store(window.gt(0).select((after - window).maximum(0), 0), row * 2)
            self.bounds.store(arg["causal"].ne(0).select(after, self.seq_len), row * 2 + 1)
            self.state.store(fn.f32(_LOWEST), row * _STATE + _MAXIMUM)
            self.state.store(fn.f32(0.0), row * _STATE + _SUM)

    def locate(self, chunk: Val, begin: Val, end: Val, high: Val) -> None:
        """Fills `keys` and `values` with the address of each pair of the chunk between tokens begin and end.

        Direct: and of the next few, which are prefetched, but never beyond the pair of the tile's last token, high - 1.
        """
        fn, arg, shape, pair = self.team.fn, self.team.arg, self.code.shape, self.code.pair
        table = self.team.buffer("block_table", "i32").at(self.seq * arg["ldb"])
        keys = self.team.buffer("key_cache", shape.cache_dtype).at(self.head * (shape.d * shape.block_size))
        values = self.team.buffer("value_cache", shape.cache_dtype).at(self.head * (shape.d * shape.block_size))
        if self.code.direct:
            with fn.loop(begin // pair, (end + (pair - 1)) // pair + _AHEAD) as index:
                token = (chunk + index * pair).minimum((high - 1) // pair * pair)
                block, offset = table.load(token // shape.block_size).to_i64(), token % shape.block_size
                self.keys.store(keys.at(block * arg["key_block"] + offset).pointer, index)
                self.values.store(values.at(block * arg["value_block"] + offset * shape.d).pointer, index)
            return
        with fn.loop(begin, end) as index:
            token = chunk + index
            block, offset = table.load(token // shape.block_size).to_i64(), token % shape.block_size
            key = keys.at(block * arg["key_block"] + offset)
            with fn.loop(0, shape.d) as component:
                self.key_copy.store(key.load(component * shape.block_size), component * CHUNK + index)
            value, copy = values.at(block * arg["value_block"] + offset * shape.d), self.value_copy.at(index * shape.d)
            self.code.columns(fn, lambda at, n: copy.store(value.load(at, n), at))

    def run(self) -> None:
        """All chunks that some row of the tile sees."""
        fn = self.team.fn
        low, high = self.bounds.load(0), self.bounds.load((self.rows - 1) * 2 + 1)
        with fn.loop((low // CHUNK) * CHUNK, high, CHUNK) as chunk:
            self.locate(chunk, (low - chunk).maximum(0), (high - chunk).minimum(CHUNK), high)
            split = split_table(list(self.code.passes))
            table = self.code.module.table(fn, split)
            done = fn.var(self.rows.type, 0)
            with fn.forever() as after:
                first = done.get()
                fn.break_if(first.ge(self.rows), after)
                size = table.load((self.rows - first).minimum(len(split) - 1))
                begin = (self.bounds.load(first * 2) - chunk).maximum(0)
                end = (self.bounds.load((first + size - 1) * 2 + 1) - chunk).minimum(CHUNK)
                with fn.when(begin.lt(end)):
                    passes = self.code.passes
                    fn.switch(
                        size, {n: functools.partial(self.run_pass, passes[n], first, chunk, begin, end) for n in passes}
                    )
                done.set(first + size)

    def run_pass(self, function: Function, first: Val, chunk: Val, begin: Val, end: Val) -> None:
        d = self.code.shape.d
        self.team.fn.call(
            function,
            self.q.at(first * d).pointer,
            self.keys.pointer,
            self.values.pointer,
            self.scores.pointer,
            self.totals.at(first * d).pointer,
            self.state.at(first * _STATE).pointer,
            self.bounds.at(first * 2).pointer,
            chunk,
            begin,
            end,
            self.team.arg["soft_cap"],
        )

    def finish(self) -> None:
        """Divides by the sum of the weights and writes the rows; a row that saw no token is zero."""
        fn, arg, d = self.team.fn, self.team.arg, self.code.shape.d
        width, pair = self.code.width, self.code.pair
        with fn.loop(0, self.rows) as row:
            token, head = self.place(row)
            out = self.team.buffer("out", self.code.shape.dtype).at((self.query_start + token) * arg["ldo"] + head * d)
            total = self.state.load(row * _STATE + _SUM)
            inverse = total.eq(0.0).select(0.0, 1.0 / total)
            totals = self.totals.at(row * d)
            with fn.loop(0, d - d % pair, pair) as at:
                halves = [totals.load(at + half * width, width) * inverse.splat(width) for half in range(2)]
                for half, value in enumerate(unpair(self.code.source, *halves)):
                    out.store(value, at + half * width)
            with fn.loop(d - d % pair, d) as at:
                out.store(totals.load(at) * inverse, at)


def _scratch(code: _Code, team: Team) -> dict[str, Buffer]:
    """The stack memory of a thread."""
    fn, d = team.fn, code.shape.d
    pairs = CHUNK // code.pair
    scratch = {
        "q": fn.stack_buffer("f32", TILE_ROWS * d),
        "totals": fn.stack_buffer("f32", TILE_ROWS * d),
        "state": fn.stack_buffer("f32", TILE_ROWS * _STATE),
        "bounds": fn.stack_buffer("i64", TILE_ROWS * 2),
        "scores": fn.stack_buffer("f32", PASS_ROWS * code.score_stride),
        "keys": fn.stack_buffer("ptr", pairs + _AHEAD),
        "values": fn.stack_buffer("ptr", pairs + _AHEAD),
        "key_copy": fn.stack_buffer("f32", 1 if code.direct else CHUNK * d),
        "value_copy": fn.stack_buffer("f32", 1 if code.direct else CHUNK * d),
    }
    if not code.direct:
        for index in range(pairs):
            scratch["keys"].store(scratch["key_copy"].at(index * code.pair).pointer, index)
            scratch["values"].store(scratch["value_copy"].at(index * code.pair * d).pointer, index)
    return scratch


def build(target: Target, shape: Shape) -> Module:
    """The module of `paged_attention(PARAMS..., threads)` for one head size, block size and pair of dtypes."""
    code = _Code(target, shape)
    with parallel_function(code.module, "paged_attention", PARAMS) as team:
        arg = team.arg
        scratch = _scratch(code, team)
        items, starts = team.buffer("items", "i32"), team.buffer("query_start", "i32")
        with team.items(arg["item_count"] * arg["kv_heads"]) as index:
            item, head = index // arg["kv_heads"], index % arg["kv_heads"]
            seq, first_row = items.load(item * 2).to_i64(), items.load(item * 2 + 1).to_i64()
            query_start = starts.load(seq).to_i64()
            query_len = starts.load(seq + 1).to_i64() - query_start
            tile = _Tile(
                code=code,
                team=team,
                seq=seq,
                head=head,
                first_row=first_row,
                rows=(query_len * shape.group - first_row).minimum(TILE_ROWS),
                query_start=query_start,
                query_len=query_len,
                seq_len=team.buffer("seq_lens", "i32").load(seq).to_i64(),
                **scratch,
            )
            tile.start()
            tile.run()
            tile.finish()
    return code.module
