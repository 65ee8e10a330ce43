"""A step's inputs on the device: made anew for each step, or persistent where a graph is replayed over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contracts.attention import BatchGeometry


@dataclass(slots=True, eq=False)
class StepBuffers:
    """R rows, T tokens; tuples have one entry a cache group. What each holds is said at the op `step_inputs`."""

    slots: Tensor  # int32 [R]
    starts: Tensor  # int32 [R + 1]
    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    seq_lens: Tensor  # int32 [R]
    slot_mappings: tuple[Tensor, ...]  # int64 [T]
    block_tables: tuple[Tensor, ...]  # int32 [R, width]

    @classmethod
    def allocate(cls, slots: Tensor, starts: Tensor, num_tokens: int, widths: Sequence[int]) -> StepBuffers:
        """For these rows, which are kept, on their device."""
        num_rows, device = len(slots), slots.device

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            slots=slots,
            starts=starts,
            input_ids=empty(num_tokens, dtype=torch.int64),
            positions=empty(num_tokens, dtype=torch.int64),
            seq_lens=empty(num_rows),
            slot_mappings=tuple(empty(num_tokens, dtype=torch.int64) for _ in widths),
            block_tables=tuple(empty(num_rows, width) for width in widths),
        )

    def part(self, slots: Tensor, starts: Tensor, num_tokens: int) -> StepBuffers:
        """The first tokens, and as many of the first rows as there are slots, over the same memory."""
        num_rows = len(slots)
        return StepBuffers(
            slots,
            starts,
            self.input_ids[:num_tokens],
            self.positions[:num_tokens],
            self.seq_lens[:num_rows],
            tuple(mapping[:num_tokens] for mapping in self.slot_mappings),
            tuple(table[:num_rows] for table in self.block_tables),
        )

    def geometries(self, block_size: int, max_query_len: int, max_seq_len: int) -> list[BatchGeometry]:
        """What the attention backend of each group is told."""
        return [
            BatchGeometry(
                query_start_loc=self.starts,
                seq_lens=self.seq_lens,
                block_table=block_table,
                slot_mapping=mapping,
                num_tokens=len(self.input_ids),
                num_requests=len(self.slots),
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                block_size=block_size,
            )
            for block_table, mapping in zip(self.block_tables, self.slot_mappings, strict=True)
        ]
