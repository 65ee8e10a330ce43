"""Rotary embedding, in place, fused with the write of keys and values into their cache blocks."""

from __future__ import annotations

import functools

import torch

from .builder import Buffer, Module
from .native import DTYPES, Native, compiled, dtype_name, threads_for
from .paged_cache import PagedCache
from .parallel import Team, parallel_function
from .target import Target, host_target
from .values import Val

_TOKENS_PER_ITEM = 4

_PARAMS = [
    ("q", "ptr"),
    ("k", "ptr"),
    ("v", "ptr"),
    ("positions", "ptr"),
    ("cos_sin", "ptr"),
    ("key_cache", "ptr"),
    ("value_cache", "ptr"),
    ("slots", "ptr"),
    ("tokens", "i64"),
    ("heads", "i64"),
    ("kv_heads", "i64"),
    ("d", "i64"),
    ("rotated", "i64"),
    ("ldq", "i64"),
    ("ldk", "i64"),
    ("ldv", "i64"),
    ("block_size", "i64"),
    ("key_block", "i64"),
    ("value_block", "i64"),
]


def _rotate(team: Team, heads: Buffer, count: Val, angles: Buffer) -> None:
    """Rotates `count` heads that lie one after the other; `angles` is the token's row of cosines and sines."""
    fn = team.fn
    width = fn.target.width
    half = team.arg["rotated"] // 2
    wide = half - half % width
    with fn.loop(0, count) as head:
        first = heads.at(head * team.arg["d"])
        second = first.at(half)

        def emit(index: Val, lanes: int) -> None:
            a, b = first.load(index, lanes), second.load(index, lanes)
            cosine, sine = angles.load(index, lanes), angles.at(half).load(index, lanes)
            first.store(fn.fma(a, cosine, -(b * sine)), index)
            second.store(fn.fma(b, cosine, a * sine), index)

        with fn.loop(0, wide, width) as index:
            emit(index, width)
        with fn.loop(wide, half) as index:
            emit(index, 1)


def _write(team: Team, k: Buffer, v: Buffer, slot: Val, cache_dtype: str) -> None:
    """Keys go to [block, head, d, offset], values to [block, head, offset, d]."""
    fn, arg = team.fn, team.arg
    width = fn.target.width
    d, block_size = arg["d"], arg["block_size"]
    block, offset = slot // block_size, slot % block_size
    keys = team.buffer("key_cache", cache_dtype).at(block * arg["key_block"] + offset)
    values = team.buffer("value_cache", cache_dtype).at(block * arg["value_block"] + offset * d)
    same = k.dtype == cache_dtype
    wide = d - d % width
    with fn.loop(0, arg["kv_heads"]) as head:
        source, target = k.at(head * d), keys.at(head * d * block_size)
        with fn.loop(0, d) as index:
            if same:
                target.at(index * block_size).copy(source.at(index))
            else:
                target.store(source.load(index), index * block_size)
        source, target = v.at(head * d), values.at(head * d * block_size)
        with fn.loop(0, wide, width) as index:
            target.store(source.load(index, width), index)
        with fn.loop(wide, d) as index:
            target.store(source.load(index), index)


def build(target: Target, dtype: str, cache_dtype: str) -> Module:
    """The module of `rope_write_kv`: q, k, v of `dtype`, a cache of `cache_dtype`.

    Null positions leave out the rotation, null slots the write.
    """
    module = Module(f"rope_write_kv_{dtype}_{cache_dtype}", target)
    with parallel_function(module, "rope_write_kv", _PARAMS) as team:
        fn, arg = team.fn, team.arg
        positions, slots = team.buffer("positions", "i64"), team.buffer("slots", "i64")
        with team.items((arg["tokens"] + (_TOKENS_PER_ITEM - 1)) // _TOKENS_PER_ITEM) as item:
            start = item * _TOKENS_PER_ITEM
            with fn.loop(start, (start + _TOKENS_PER_ITEM).minimum(arg["tokens"])) as token:
                k = team.buffer("k", dtype).at(token * arg["ldk"])
                with fn.when(positions.is_set()):
                    angles = team.buffer("cos_sin", "f32").at(positions.load(token) * arg["rotated"])
                    _rotate(team, team.buffer("q", dtype).at(token * arg["ldq"]), arg["heads"], angles)
                    _rotate(team, k, arg["kv_heads"], angles)
                with fn.when(slots.is_set()):
                    slot = slots.load(token)
                    with fn.when(slot.ge(0)):
                        _write(team, k, team.buffer("v", dtype).at(token * arg["ldv"]), slot, cache_dtype)
    return module


@functools.cache
def _native(target: Target, dtype: str, cache_dtype: str) -> Native:
    return compiled(lambda: build(target, dtype, cache_dtype), "rope_write_kv", _PARAMS)


def _check_tokens(op: str, name: str, x: torch.Tensor) -> None:
    if x.dim() != 3 or x.stride(2) != 1 or (x.stride(1) != x.shape[2] and x.shape[1] != 1):
        raise ValueError(
            f"{op}: {name} must be [T, heads, D] with contiguous tokens, not {tuple(x.shape)} {x.stride()}"
        )


def _check_vector(op: str, name: str, x: torch.Tensor, tokens: int) -> None:
    if x.dtype is not torch.int64 or x.shape[0] != tokens or x.stride(0) != 1:
        raise ValueError(
            f"{op}: {name} must be contiguous int64 [{tokens}], not {x.dtype} {tuple(x.shape)} {x.stride()}"
        )


def _check_angles(op: str, cos_sin: torch.Tensor, d: int) -> None:
    rotated = cos_sin.shape[1]
    if cos_sin.dtype is not torch.float32 or not cos_sin.is_contiguous() or rotated > d or rotated % 2:
        raise ValueError(
            f"{op}: cos_sin must be contiguous float32 [positions, even number <= {d}], "
            f"not {cos_sin.dtype} {tuple(cos_sin.shape)}"
        )


class RopeWriteKV:
    """Rotation and cache write of one layer, checked and compiled once; a call costs a few microseconds of Python.

    Works on the fused qkv output [T, (H + 2 KVH) D] in place: queries and keys are rotated, keys and values are also
    written to the cache. With cos_sin None nothing is rotated.
    """

    def __init__(self, heads: int, cos_sin: torch.Tensor | None, cache: PagedCache, dtype: torch.dtype) -> None:
        """cos_sin: see `rope_write_kv`; dtype: that of qkv."""
        if dtype not in DTYPES:
            raise TypeError(f"RopeWriteKV: qkv must be float32 or bfloat16, not {dtype}")
        if cos_sin is not None:
            _check_angles("RopeWriteKV", cos_sin, cache.d)
        self.heads = heads
        self.cache = cache
        self.cos_sin = cos_sin
        self.dtype = dtype
        self._width = (heads + 2 * cache.kv_heads) * cache.d
        size = 2 if dtype is torch.bfloat16 else 4
        self._key_offset = heads * cache.d * size
        self._value_offset = (heads + cache.kv_heads) * cache.d * size
        self._angles = 0 if cos_sin is None else cos_sin.data_ptr()
        self._rotated = 0 if cos_sin is None else cos_sin.shape[1]
        self._native = _native(host_target(), DTYPES[dtype], cache.dtype)

    def __call__(
        self, qkv: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, *, threads: int | None = None
    ) -> None:
        """qkv [T, (H + 2 KVH) D], rows may be strided; positions and slot_mapping int64 [T], see `rope_write_kv`."""
        tokens, width = qkv.shape
        if width != self._width or qkv.dtype is not self.dtype or qkv.stride(1) != 1:
            raise ValueError(
                f"RopeWriteKV: qkv must be [T, {self._width}] {self.dtype}, not {tuple(qkv.shape)} {qkv.dtype}"
            )
        _check_vector("RopeWriteKV", "positions", positions, tokens)
        _check_vector("RopeWriteKV", "slot_mapping", slot_mapping, tokens)
        cache = self.cache
        address, stride = qkv.data_ptr(), qkv.stride(0)
        self._native(
            address,
            address + self._key_offset,
            address + self._value_offset,
            positions.data_ptr() if self._angles else 0,
            self._angles,
            cache.key_address,
            cache.value_address,
            slot_mapping.data_ptr(),
            tokens,
            self.heads,
            cache.kv_heads,
            cache.d,
            self._rotated,
            stride,
            stride,
            stride,
            cache.block_size,
            cache.key_block,
            cache.value_block,
            threads_for(2 * tokens * width, threads),
        )


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Rotates q [T, H, D] and k [T, KVH, D] in place, then writes k and v [T, KVH, D] to the cache.

    q, k, v: float32 or bfloat16 of one dtype, views of the fused qkv output allowed (each token contiguous).
    positions: int64 [T]. cos_sin: float32 [max_position, R], cosines in the first R / 2 columns, sines in the others;
    the first R <= D components of a head are rotated, pairing i with i + R / 2.
    key_cache, value_cache: see `PagedCache`.
    slot_mapping: int64 [T], block * block_size + offset; a negative slot writes nothing.
    """
    _check_angles("rope_write_kv", cos_sin, q.shape[-1])
    cache = PagedCache.of(key_cache, value_cache)
    _call("rope_write_kv", q, k, v, positions, cos_sin, cache, slot_mapping, threads)


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, threads: int | None = None
) -> None:
    """Rotates q and k in place; the arguments are those of `rope_write_kv`."""
    _check_angles("rotary_embedding", cos_sin, q.shape[-1])
    _call("rotary_embedding", q, k, None, positions, cos_sin, None, None, threads)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Writes k and v to the cache, unrotated; the arguments are those of `rope_write_kv`."""
    write_to(PagedCache.of(key_cache, value_cache), k, v, slot_mapping, threads=threads)


def write_to(
    cache: PagedCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *, threads: int | None = None
) -> None:
    """`write_kv` into a cache that was looked at before: for every step of a layer."""
    _call("write_kv", None, k, v, None, None, cache, slot_mapping, threads)


def _call(
    op: str,
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    cache: PagedCache | None,
    slots: torch.Tensor | None,
    threads: int | None,
) -> None:
    _check_tokens(op, "k", k)
    tokens, kv_heads, d = k.shape
    dtype = dtype_name(op, k)
    heads = 0 if q is None else q.shape[1]
    for name, other, shape in (("q", q, (tokens, heads, d)), ("v", v, k.shape)):
        if other is not None:
            _check_tokens(op, name, other)
            if other.dtype is not k.dtype or other.shape != shape:
                raise ValueError(
                    f"{op}: {name} {tuple(other.shape)} {other.dtype} does not go with k {tuple(k.shape)} {k.dtype}"
                )
    for name, vector in (("positions", positions), ("slot_mapping", slots)):
        if vector is not None:
            _check_vector(op, name, vector, tokens)
    if cache is not None and (cache.kv_heads, cache.d) != (kv_heads, d):
        raise ValueError(f"{op}: the cache holds {cache.kv_heads} heads of {cache.d}, k has {kv_heads} of {d}")
    _native(host_target(), dtype, dtype if cache is None else cache.dtype)(
        0 if q is None else q.data_ptr(),
        k.data_ptr(),
        0 if v is None else v.data_ptr(),
        0 if positions is None else positions.data_ptr(),
        0 if cos_sin is None else cos_sin.data_ptr(),
        0 if cache is None else cache.key_address,
        0 if cache is None else cache.value_address,
        0 if slots is None else slots.data_ptr(),
        tokens,
        heads,
        kv_heads,
        d,
        0 if cos_sin is None else cos_sin.shape[1],
        0 if q is None else q.stride(0),
        k.stride(0),
        0 if v is None else v.stride(0),
        1 if cache is None else cache.block_size,
        0 if cache is None else cache.key_block,
        0 if cache is None else cache.value_block,
        threads_for(2 * tokens * (heads + 2 * kv_heads) * d, threads),
    )
