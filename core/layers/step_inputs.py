"""The torch reference of the op `step_inputs`: where each token of a step stands, worked out on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
) -> None:
    """The op of that name in contracts/kernels.py."""
    num_rows, num_tokens = len(slots), len(input_ids)
    at = slots.to(torch.int64)
    computed = num_computed.index_select(0, at)
    counts = starts.diff().to(torch.int64)
    after = computed + counts
    seq_lens.copy_(after)
    num_computed.index_copy_(0, at, after)
    used = int(starts[num_rows])
    if used == num_tokens == num_rows:  # a token each: decode
        row_of_token, here = None, computed
    else:
        row_of_token = torch.repeat_interleave(counts, output_size=used)
        shift = (computed - starts[:-1]).index_select(0, row_of_token)
        here = torch.arange(used, device=slots.device) + shift
    slot_of_token = at if row_of_token is None else at.index_select(0, row_of_token)
    positions[:used] = here
    input_ids[:used] = token_ids.view(-1).take(slot_of_token * token_ids.shape[1] + here)
    columns = torch.div(here, block_size, rounding_mode="floor")
    for table, mapping, block_table in zip(tables, slot_mappings, block_tables, strict=True):
        width = block_table.shape[1]
        block_table.copy_(table[:, :width].index_select(0, at))
        if row_of_token is None:
            blocks = block_table.gather(1, columns.unsqueeze(1)).squeeze(1)
        else:
            blocks = block_table.view(-1).take(row_of_token * width + columns)
        mapping[:used] = blocks.to(torch.int64) * block_size + here - columns * block_size
        mapping[used:] = -1
    positions[used:] = 0
    input_ids[used:] = 0
