"""Rotary embedding, in place, fused with the write of keys and values into their cache blocks."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .builder import Buffer, Module
from .native import Native, compiled, dtype_name, threads_for
from .paged_cache import PagedCache, Places
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
    ("slots", "ptr"),
    ("tokens", "i64"),
    ("heads", "i64"),
    ("kv_heads", "i64"),
    ("d", "i64"),
    ("value_d", "i64"),
    ("rotated", "i64"),
    ("ldq", "i64"),
    ("ldk", "i64"),
    ("ldv", "i64"),
    ("block_size", "i64"),
    ("key_cache", "ptr"),  # then its strides, as in `Places`
    ("key_block", "i64"),
    ("key_token", "i64"),
    ("key_head", "i64"),
    ("key_dim", "i64"),
    ("value_cache", "ptr"),
    ("value_block", "i64"),
    ("value_token", "i64"),
    ("value_head", "i64"),
    ("value_dim", "i64"),
]
_NOWHERE = (0, 0, 0, 0, 0)


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


def _write(team: Team, name: str, x: Buffer, slot: Val, dim: Val, cache_dtype: str) -> None:
    """A token's heads of `dim` elements to their places in the cache `name`, "key" or "value"."""
    fn, arg = team.fn, team.arg
    width = fn.target.width
    step = arg[f"{name}_dim"]
    block, offset = slot // arg["block_size"], slot % arg["block_size"]
    cache = team.buffer(f"{name}_cache", cache_dtype).at(block * arg[f"{name}_block"] + offset * arg[f"{name}_token"])
    with fn.loop(0, arg["kv_heads"]) as head:
        source, target = x.at(head * dim), cache.at(head * arg[f"{name}_head"])
        with fn.when(step.eq(1)):
            with fn.loop(0, dim - dim % width, width) as index:
                target.store(source.load(index, width), index)
            with fn.loop(dim - dim % width, dim) as index:
                target.store(source.load(index), index)
        with fn.when(step.ne(1)), fn.loop(0, dim) as index:
            if x.dtype == cache_dtype:
                target.at(index * step).copy(source.at(index))
            else:
                target.store(source.load(index), index * step)


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
                        _write(team, "key", k, slot, arg["d"], cache_dtype)
                        v = team.buffer("v", dtype).at(token * arg["ldv"])
                        _write(team, "value", v, slot, arg["value_d"], cache_dtype)
    return module


@functools.cache
def _native(target: Target, dtype: str, cache_dtype: str) -> Native:
    return compiled(lambda: build(target, dtype, cache_dtype), "rope_write_kv", _PARAMS)


class _Tokens(NamedTuple):
    """One of q, k and v: address, heads, their size, elements from a token to the next."""

    address: int
    heads: int
    d: int
    stride: int


_NOTHING = _Tokens(0, 0, 0, 0)


def _tokens(op: str, name: str, x: torch.Tensor, tokens: int, dtype: torch.dtype) -> _Tokens:
    shape, stride = x.shape, x.stride()
    if len(shape) != 3 or stride[2] != 1 or (stride[1] != shape[2] and shape[1] != 1):
        raise ValueError(f"{op}: {name} must be [T, heads, D] with contiguous tokens, not {tuple(shape)} {stride}")
    if shape[0] != tokens or x.dtype is not dtype:
        raise ValueError(f"{op}: {name} {tuple(shape)} {x.dtype} does not go with k of {tokens} tokens in {dtype}")
    return _Tokens(x.data_ptr(), shape[1], shape[2], stride[0])


def _vector(op: str, name: str, x: torch.Tensor, tokens: int) -> int:
    """Its address."""
    if x.dtype is not torch.int64 or x.shape != (tokens,) or not x.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be contiguous int64 [{tokens}], not {x.dtype} {tuple(x.shape)} {x.stride()}"
        )
    return x.data_ptr()


def _rotated(op: str, cos_sin: torch.Tensor, d: int) -> int:
    """How many elements of a head its angles rotate."""
    rotated = cos_sin.shape[1]
    if cos_sin.dtype is not torch.float32 or not cos_sin.is_contiguous() or rotated > d or rotated % 2:
        raise ValueError(
            f"{op}: cos_sin must be contiguous float32 [positions, even number <= {d}], "
            f"not {cos_sin.dtype} {tuple(cos_sin.shape)}"
        )
    return rotated


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    threads: int | None = None,
) -> None:
    """Rotates q [T, H, D] and k [T, KVH, D] in place, then writes k and v [T, KVH, Dv] to the cache: the op of that name
    in contracts/kernels.py.

    q, k, v: float32 or bfloat16 of one dtype, views of the fused qkv output allowed (each token contiguous).
    positions: int64 [T]. cos_sin: float32 [max_position, R], cosines in the first R / 2 columns, sines in the others;
    the first R <= D components of a head are rotated, pairing i with i + R / 2. None: nothing is rotated.
    keys, values: float32 or bfloat16, [blocks, block_size, KVH, D] and [blocks, block_size, KVH, Dv] of any strides.
    slot_mapping: int64 [T], block * block_size + offset; a negative slot writes nothing.
    """
    op = "rope_write_kv"
    (_, block_size, kv_heads, d), (*stored, value_d) = keys.shape, values.shape
    if stored[1:] != [block_size, kv_heads] or keys.dtype is not values.dtype:
        raise ValueError(
            f"{op}: keys {tuple(keys.shape)} {keys.dtype} and values {tuple(values.shape)} {values.dtype} "
            "are no cache of one dtype, block size and number of heads"
        )
    places = Places(
        dtype_name(op, keys),
        (kv_heads, d, value_d),
        block_size,
        (keys.data_ptr(), *keys.stride()),
        (values.data_ptr(), *values.stride()),
    )
    _call(op, q, k, v, positions, cos_sin, places, slot_mapping, threads)


def rotary_embedding(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, threads: int | None = None
) -> None:
    """Rotates q and k in place; the arguments are those of `rope_write_kv`."""
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
    """Writes k and v to the cache, unrotated. key_cache, value_cache: see `PagedCache`; the others: see `rope_write_kv`."""
    write_to(PagedCache.of(key_cache, value_cache), k, v, slot_mapping, threads=threads)


def write_to(
    cache: PagedCache, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *, threads: int | None = None
) -> None:
    """`write_kv` into a cache that was looked at before: for every step of a layer."""
    _call("write_kv", None, k, v, None, None, cache.places, slot_mapping, threads)


def _call(
    op: str,
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    places: Places | None,
    slots: torch.Tensor | None,
    threads: int | None,
) -> None:
    """q, positions, cos_sin None: no rotation. v, places, slots None: no write."""
    dtype, tokens = dtype_name(op, k), k.shape[0]
    keys = _tokens(op, "k", k, tokens, k.dtype)
    queries = _NOTHING if q is None else _tokens(op, "q", q, tokens, k.dtype)
    values = _NOTHING if v is None else _tokens(op, "v", v, tokens, k.dtype)
    if q is not None and queries.d != keys.d:
        raise ValueError(f"{op}: heads of q have {queries.d} elements, those of k {keys.d}")
    if places is not None and (places.heads != (keys.heads, keys.d, values.d) or values.heads != keys.heads):
        raise ValueError(
            f"{op}: the cache holds {places.heads[0]} heads of {places.heads[1:]} elements, "
            f"k has {keys.heads} of {keys.d}, v {values.heads} of {values.d}"
        )
    angles = rotated = 0
    if cos_sin is not None:
        rotated = _rotated(op, cos_sin, keys.d)
        angles = cos_sin.data_ptr()
    _native(host_target(), dtype, dtype if places is None else places.dtype)(
        queries.address,
        keys.address,
        values.address,
        0 if positions is None or not angles else _vector(op, "positions", positions, tokens),
        angles,
        0 if slots is None else _vector(op, "slot_mapping", slots, tokens),
        tokens,
        queries.heads,
        keys.heads,
        keys.d,
        values.d,
        rotated,
        queries.stride,
        keys.stride,
        values.stride,
        1 if places is None else places.block_size,
        *(_NOWHERE if places is None else places.keys),
        *(_NOWHERE if places is None else places.values),
        threads_for(2 * tokens * ((queries.heads + keys.heads) * keys.d + values.heads * values.d), threads),
    )
