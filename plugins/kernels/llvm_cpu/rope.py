"""Rotary embedding, in place, fused with the write of keys and values into their cache blocks."""

from __future__ import annotations

import functools

import torch

from hotswap.core.layers.jit import Buffer, Module, Target, Team, Val, host_target, parallel_function

from .common import Native, compiled, dtype_name, threads_for

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
    """Rotates `count` heads that lie one after the other; `angles` is the token's row of the cache: cosines, then sines."""
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
def _native(dtype: str, cache_dtype: str) -> Native:
    return compiled(lambda: build(host_target(), dtype, cache_dtype), "rope_write_kv", _PARAMS)


def _check_heads(op: str, name: str, x: torch.Tensor) -> None:
    if x.dim() != 3 or x.stride(2) != 1 or (x.stride(1) != x.shape[2] and x.shape[1] != 1):
        raise ValueError(
            f"{op}: {name} must be [T, heads, D] with contiguous tokens, not {tuple(x.shape)} {x.stride()}"
        )


def _check_rotation(op: str, q: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    tokens, _, d = q.shape
    if positions.dtype is not torch.int64 or positions.shape != (tokens,) or positions.stride(0) != 1:
        raise ValueError(f"{op}: positions must be int64 [{tokens}], not {positions.dtype} {tuple(positions.shape)}")
    rotated = cos_sin.shape[1]
    if cos_sin.dtype is not torch.float32 or not cos_sin.is_contiguous() or rotated > d or rotated % 2:
        raise ValueError(
            f"{op}: cos_sin must be contiguous float32 [positions, even number <= {d}], "
            f"not {cos_sin.dtype} {tuple(cos_sin.shape)}"
        )


def _check_caches(op: str, k: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    _, heads, d = k.shape
    blocks, block_size = key_cache.shape[0], key_cache.shape[3]
    if key_cache.shape != (blocks, heads, d, block_size) or value_cache.shape != (blocks, heads, block_size, d):
        raise ValueError(
            f"{op}: caches for {heads} heads of {d} are [blocks, heads, D, block_size] and "
            f"[blocks, heads, block_size, D], not {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if (
        key_cache.stride()[1:] != (d * block_size, block_size, 1)
        or value_cache.stride()[1:] != (d * block_size, d, 1)
        or key_cache.dtype is not value_cache.dtype
    ):
        raise ValueError(f"{op}: both caches must have one dtype and contiguous blocks")


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
    positions: int64 [T]. cos_sin: float32 [max_position, R], cosines in the first R / 2 columns and sines in the others;
    the first R <= D components of a head are rotated, pairing i with i + R / 2.
    key_cache [blocks, KVH, D, block_size], value_cache [blocks, KVH, block_size, D]: float32 or bfloat16.
    slot_mapping: int64 [T], block * block_size + offset; a negative slot writes nothing.
    """
    _check_rotation("rope_write_kv", q, positions, cos_sin)
    _call("rope_write_kv", q, k, v, positions, cos_sin, key_cache, value_cache, slot_mapping, threads)


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, threads: int | None = None
) -> None:
    """Rotates q and k in place; the arguments are those of `rope_write_kv`."""
    _check_rotation("rotary_embedding", q, positions, cos_sin)
    _call("rotary_embedding", q, k, None, positions, cos_sin, None, None, None, threads)


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
    _call("write_kv", None, k, v, None, None, key_cache, value_cache, slot_mapping, threads)


def _call(
    op: str,
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    slots: torch.Tensor | None,
    threads: int | None,
) -> None:
    _check_heads(op, "k", k)
    tokens, kv_heads, d = k.shape
    dtype = cache_dtype = dtype_name(op, k)
    heads = 0
    if q is not None:
        _check_heads(op, "q", q)
        heads = q.shape[1]
        if q.dtype is not k.dtype or q.shape != (tokens, heads, d):
            raise ValueError(f"{op}: q {tuple(q.shape)} {q.dtype} does not go with k {tuple(k.shape)} {k.dtype}")
    if v is not None and key_cache is not None and value_cache is not None and slots is not None:
        _check_heads(op, "v", v)
        _check_caches(op, k, key_cache, value_cache)
        if v.shape != k.shape or v.dtype is not k.dtype:
            raise ValueError(f"{op}: v {tuple(v.shape)} {v.dtype} does not go with k {tuple(k.shape)} {k.dtype}")
        if slots.dtype is not torch.int64 or slots.shape != (tokens,) or slots.stride(0) != 1:
            raise ValueError(f"{op}: slot_mapping must be int64 [{tokens}], not {slots.dtype} {tuple(slots.shape)}")
        cache_dtype = dtype_name(op, key_cache)
    _native(dtype, cache_dtype)(
        0 if q is None else q.data_ptr(),
        k.data_ptr(),
        0 if v is None else v.data_ptr(),
        0 if positions is None else positions.data_ptr(),
        0 if cos_sin is None else cos_sin.data_ptr(),
        0 if key_cache is None else key_cache.data_ptr(),
        0 if value_cache is None else value_cache.data_ptr(),
        0 if slots is None else slots.data_ptr(),
        tokens,
        heads,
        kv_heads,
        d,
        0 if cos_sin is None else cos_sin.shape[1],
        0 if q is None else q.stride(0),
        k.stride(0),
        0 if v is None else v.stride(0),
        1 if key_cache is None else key_cache.shape[3],
        0 if key_cache is None else key_cache.stride(0),
        0 if value_cache is None else value_cache.stride(0),
        threads_for(2 * tokens * (heads + 2 * kv_heads) * d, threads),
    )
