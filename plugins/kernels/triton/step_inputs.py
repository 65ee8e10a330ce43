"""The op `step_inputs`: one launch for each cache group, a program for each row and one for the padding."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .launch import pdl_options

TILE = 512  # tokens, or columns of a block table, of one turn
WARPS = 4

# Everything varies from step to step, and with it where in a staging buffer a tensor begins: nothing may be specialised,
# or a new variant would be compiled in the middle of serving.
_VARYING = (
    *("slots", "starts", "num_computed", "token_ids", "table", "input_ids", "positions", "seq_lens", "mapping"),
    *("block_table", "num_rows", "num_tokens", "width", "token_stride", "table_stride", "block_table_stride"),
)


@triton.jit(do_not_specialize=_VARYING)
def _step_inputs_kernel(  # type: ignore[no-untyped-def]
    slots,
    starts,
    num_computed,
    token_ids,
    table,
    input_ids,
    positions,
    seq_lens,
    mapping,
    block_table,
    num_rows,
    num_tokens,
    width,
    token_stride,
    table_stride,
    block_table_stride,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,  # whether this launch writes what all groups share
    TABLE: tl.constexpr,  # whether it writes a group's slots and block table
    ADVANCE: tl.constexpr,  # whether it advances num_computed: the last launch
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    lane = tl.arange(0, TILE)
    first = tl.load(starts + row)
    if row == num_rows:
        begin = first
        while begin < num_tokens:
            token = begin + lane
            if TOKENS:
                tl.store(input_ids + token, tl.zeros([TILE], tl.int64), mask=token < num_tokens)
                tl.store(positions + token, tl.zeros([TILE], tl.int64), mask=token < num_tokens)
            if TABLE:
                tl.store(mapping + token, tl.full([TILE], -1, tl.int64), mask=token < num_tokens)
            begin += TILE
    else:
        slot = tl.load(slots + row).to(tl.int64)
        computed = tl.load(num_computed + slot)
        count = tl.load(starts + row + 1) - first
        blocks = table + slot * table_stride
        begin = 0
        while begin < count:
            index = begin + lane
            inside = index < count
            position = computed + index
            if TOKENS:
                token = tl.load(token_ids + slot * token_stride + position, mask=inside, other=0)
                tl.store(input_ids + first + index, token.to(tl.int64), mask=inside)
                tl.store(positions + first + index, position, mask=inside)
            if TABLE:
                block = tl.load(blocks + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
                tl.store(mapping + first + index, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
            begin += TILE
        if TABLE:
            copied = block_table + row.to(tl.int64) * block_table_stride
            begin = 0
            while begin < width:
                column = begin + lane
                tl.store(copied + column, tl.load(blocks + column, mask=column < width, other=0), mask=column < width)
                begin += TILE
        if TOKENS:
            tl.store(seq_lens + row, (computed + count).to(tl.int32))
        if ADVANCE:
            # Every warp loads num_computed for itself: none may find it advanced. Rows without tokens, which may share
            # a slot with others, do not touch it.
            tl.debug_barrier()
            tl.store(num_computed + slot, computed + count, mask=count > 0)


def step_inputs(
    slots: Tensor,
    starts: Tensor,
    num_computed: Tensor,
    token_ids: Tensor,
    tables: Sequence[Tensor],
    block_size: int,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mappings: Sequence[Tensor],
    block_tables: Sequence[Tensor],
    *,
    pdl: bool,
) -> None:
    """The op of that name."""
    num_rows = slots.shape[0]
    groups = list(zip(tables, slot_mappings, block_tables, strict=True))
    for index in range(max(len(groups), 1)):
        # Without a group the tensors of one are never touched: any will do.
        table, mapping, block_table = groups[index] if groups else (token_ids, positions, token_ids)
        _step_inputs_kernel[(num_rows + 1,)](
            slots,
            starts,
            num_computed,
            token_ids,
            table,
            input_ids,
            positions,
            seq_lens,
            mapping,
            block_table,
            num_rows,
            input_ids.shape[0],
            block_table.shape[1],
            token_ids.stride(0),
            table.stride(0),
            block_table.stride(0),
            BLOCK_SIZE=block_size,
            TILE=TILE,
            TOKENS=index == 0,
            TABLE=bool(groups),
            ADVANCE=index >= len(groups) - 1,
            num_warps=WARPS,
            **pdl_options(pdl),
        )
