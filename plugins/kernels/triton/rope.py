"""The ops `rope` and `rope_write_kv`: a program takes a group of heads of one token.

The groups of a token are those of its queries, then of its keys, then of its values; so one token alone keeps several
multiprocessors busy.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, next_power_of_two, pdl_options, warps_for

TILE = 512  # pairs that a program rotates
PER_THREAD = 8  # pairs of a thread: loads of 16 bytes in bfloat16


@triton.jit
def _move_heads(  # type: ignore[no-untyped-def]
    source,
    source_head,
    target,
    target_head,
    target_dim,
    angles,
    first_head,
    num_heads,
    written,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    REST: tl.constexpr,
):
    """Moves GROUP heads of a token from `source` to `target`, where `written` holds: the first 2 * HALF dimensions
    rotated, and what is left of SIZE as it is when REST. angles: the position's row of cosines and sines."""
    head = first_head + tl.arange(0, GROUP)[:, None]
    present = (head < num_heads) & written
    head = head.to(tl.int64)
    source += head * source_head
    target += head * target_head
    read_as = source.dtype.element_ty
    stored_as = target.dtype.element_ty
    if HALF > 0:
        pair = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
        inside = (pair < HALF) & present
        # Loaded once for each head, out of the first cache after the first: in the layout of the heads, they need not
        # be handed from thread to thread.
        angles += tl.broadcast_to(pair, (GROUP, pair.shape[1]))
        cosine = tl.load(angles, mask=inside, other=0.0)
        sine = tl.load(angles + HALF, mask=inside, other=0.0)
        a = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + HALF + pair, mask=inside, other=0.0).to(tl.float32)
        # Rounded to the activations' dtype first, as a rotation in place followed by a cast would.
        tl.store(target + pair * target_dim, (a * cosine - b * sine).to(read_as).to(stored_as), mask=inside)
        tl.store(target + (HALF + pair) * target_dim, (b * cosine + a * sine).to(read_as).to(stored_as), mask=inside)
    if REST:
        dim = 2 * HALF + tl.arange(0, triton.next_power_of_2(SIZE - 2 * HALF))[None, :]
        inside = (dim < SIZE) & present
        tl.store(target + dim * target_dim, tl.load(source + dim, mask=inside, other=0.0).to(stored_as), mask=inside)


@triton.jit(do_not_specialize=["positions"])
def _rope_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    positions,
    cos_sin,
    q_token,
    q_head,
    k_token,
    k_head,
    angle_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    Q_GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    KV_GROUPS: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    program = tl.program_id(0)
    token = (program // (Q_GROUPS + KV_GROUPS)).to(tl.int64)
    group = program % (Q_GROUPS + KV_GROUPS)
    angles = cos_sin + tl.load(positions + token) * angle_stride
    if group < Q_GROUPS:
        row = q + token * q_token
        _move_heads(row, q_head, row, q_head, 1, angles, group * GROUP, HEADS, True, SIZE, HALF, GROUP, False)
    else:
        row = k + token * k_token
        first = (group - Q_GROUPS) * GROUP
        _move_heads(row, k_head, row, k_head, 1, angles, first, KV_HEADS, True, SIZE, HALF, GROUP, False)


@triton.jit(do_not_specialize=["positions", "slot_mapping"])
def _rope_write_kv_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    positions,
    cos_sin,
    keys,
    values,
    slot_mapping,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    angle_stride,
    keys_block,
    keys_token,
    keys_head,
    keys_dim,
    values_block,
    values_token,
    values_head,
    values_dim,
    HEADS: tl.constexpr,  # 0: nothing is rotated, and queries are left alone
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    Q_GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    KV_GROUPS: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    program = tl.program_id(0)
    token = (program // (Q_GROUPS + 2 * KV_GROUPS)).to(tl.int64)
    group = program % (Q_GROUPS + 2 * KV_GROUPS)
    angles = cos_sin
    if HALF > 0:
        angles += tl.load(positions + token) * angle_stride
    slot = tl.load(slot_mapping + token)
    block = slot // BLOCK_SIZE
    place = slot % BLOCK_SIZE
    if group < Q_GROUPS:
        row = q + token * q_token
        _move_heads(row, q_head, row, q_head, 1, angles, group * GROUP, HEADS, True, SIZE, HALF, GROUP, False)
    elif group < Q_GROUPS + KV_GROUPS:
        row = k + token * k_token
        cache = keys + block * keys_block + place * keys_token
        first = (group - Q_GROUPS) * GROUP
        _move_heads(
            row,
            k_head,
            cache,
            keys_head,
            keys_dim,
            angles,
            first,
            KV_HEADS,
            slot >= 0,
            SIZE,
            HALF,
            GROUP,
            SIZE > 2 * HALF,
        )
    else:
        row = v + token * v_token
        cache = values + block * values_block + place * values_token
        first = (group - Q_GROUPS - KV_GROUPS) * GROUP
        _move_heads(
            row, v_head, cache, values_head, values_dim, angles, first, KV_HEADS, slot >= 0, VALUE_SIZE, 0, GROUP, True
        )


def _grouping(pairs: int, most_heads: int) -> tuple[int, int]:
    """(heads of a program, warps)."""
    width = next_power_of_two(pairs)
    group = min(max(TILE // width, 1), next_power_of_two(most_heads))
    return group, warps_for(group * width, PER_THREAD)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, pdl: bool) -> None:
    """The op of that name."""
    _check_last_dimension(q=q, k=k, cos_sin=cos_sin)
    (tokens, heads, size), kv_heads, half = q.shape, k.shape[1], cos_sin.shape[1] // 2
    group, warps = _grouping(half, max(heads, kv_heads))
    _rope_kernel[(tokens * (ceil_div(heads, group) + ceil_div(kv_heads, group)),)](
        q,
        k,
        positions,
        cos_sin,
        *q.stride()[:2],
        *k.stride()[:2],
        cos_sin.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        HALF=half,
        GROUP=group,
        num_warps=warps,
        **pdl_options(pdl),
    )


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    *,
    pdl: bool,
) -> None:
    """The op of that name. k itself stays as it was. A value that a float8 cache cannot hold becomes its largest."""
    _check_last_dimension(k=k, v=v)
    tokens, kv_heads, size = k.shape
    half = heads = 0
    if cos_sin is not None:
        _check_last_dimension(q=q, cos_sin=cos_sin)
        half, heads = cos_sin.shape[1] // 2, q.shape[1]
    group, warps = _grouping(half or ceil_div(size, 2), max(heads, kv_heads))
    _rope_write_kv_kernel[(tokens * (ceil_div(heads, group) + 2 * ceil_div(kv_heads, group)),)](
        q,
        k,
        v,
        positions,
        k if cos_sin is None else cos_sin,
        keys,
        values,
        slot_mapping,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        0 if cos_sin is None else cos_sin.stride(0),
        *keys.stride(),
        *values.stride(),
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        VALUE_SIZE=v.shape[2],
        HALF=half,
        BLOCK_SIZE=keys.shape[1],
        GROUP=group,
        num_warps=warps,
        **pdl_options(pdl),
    )


def _check_last_dimension(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has a stride of {tensor.stride(-1)} in its last dimension; it must be contiguous")
