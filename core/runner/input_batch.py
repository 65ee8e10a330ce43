"""The persistent batch: one slot a request, filled at admission, updated by each plan's deltas, never rebuilt.

    token_ids[slot]:  |<------- prompt ------->|<-- outputs -->|  unused ...
                      0                        num_prompt      next position to draw

A drawn token is written at its position on the device, and the next step gathers its input from there: a plan can be
made and applied before the host knows the token. Positions, sequence lengths and slots derive from `num_computed` on
the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contracts.attention import BatchGeometry
from ..contracts.plan import NewRequest, ScheduledRequest, StepPlan


@dataclass(slots=True, eq=False)
class BatchRequest:
    """The host's side of one slot. Owned by InputBatch.

    num_computed: tokens computed by the steps applied so far. num_blocks: per cache group.
    """

    request_id: int
    slot: int
    num_prompt_tokens: int
    num_computed: int
    num_blocks: list[int]


@dataclass(slots=True, eq=False)
class StepInputs:
    """One step's batch: R rows in plan order, T tokens.

    starts: first token of each row in the flat batch, and T at the end. before: tokens computed before this step, per
        row.
    seq_lens: int64 [R], on the device: also the position of the token that each row would draw next.
    """

    requests: list[BatchRequest]
    starts: list[int]
    before: list[int]
    slots: Tensor  # int64 [R]
    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    seq_lens: Tensor
    geometries: list[BatchGeometry]  # one per cache group


class InputBatch:
    """Not thread-safe: the worker's thread only.

    max_model_len bounds a request's tokens; one more column takes a token drawn past it, which nobody will read.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int, device: str) -> None:
        self.device = device
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self._stride = max_model_len + 1
        max_blocks = -(-max_model_len // block_size) + 1
        # Never read beyond what was written, so left unset: a CPU then backs only the pages in use.
        self.token_ids = torch.empty((max_num_seqs, self._stride), dtype=torch.int32, device=device)
        self.num_computed = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.num_prompt_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._tables = [
            torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self._requests: dict[int, BatchRequest] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._counting = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._last_slots: list[int] = []  # of the step before: decode steps repeat them
        self._last_slots_tensor = torch.zeros(0, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def remove(self, request_id: int) -> None:
        """Frees a slot. A request that never reached this worker (aborted before its first step) is no error."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._free.append(request.slot)

    def clear(self) -> None:
        for request_id in list(self._requests):
            self.remove(request_id)

    def add(self, new: NewRequest) -> BatchRequest:
        """Fills a slot. Raises RuntimeError on a plan that cannot be right: no seat left, known already, too long."""
        if new.request_id in self._requests:
            raise RuntimeError(f"request {new.request_id} is in the batch already")
        if not self._free:
            raise RuntimeError(f"request {new.request_id} has no seat: all {self.max_num_seqs} are taken")
        if len(new.token_ids) >= self._stride:
            raise RuntimeError(
                f"request {new.request_id} has {len(new.token_ids)} tokens; at most {self._stride - 1} fit"
            )
        slot = self._free.pop()
        self.token_ids[slot, : len(new.token_ids)] = torch.tensor(new.token_ids, dtype=torch.int32, device=self.device)
        self.num_computed[slot] = new.num_computed_tokens
        self.num_prompt_tokens[slot] = new.num_prompt_tokens
        for table, blocks in zip(self._tables, new.block_ids, strict=True):
            table[slot].zero_()
            table[slot, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32, device=self.device)
        request = BatchRequest(
            new.request_id,
            slot,
            new.num_prompt_tokens,
            new.num_computed_tokens,
            [len(blocks) for blocks in new.block_ids],
        )
        self._requests[new.request_id] = request
        return request

    def build(self, plan: StepPlan) -> StepInputs:
        """Appends the plan's new blocks, lays out its rows and counts them as computed."""
        requests, starts, before = self._advance(plan.scheduled)
        num_rows, num_tokens = len(requests), starts[-1]
        slots = self._slots(requests)
        computed = self.num_computed.index_select(0, slots)
        if num_tokens == num_rows:  # one token each: decode
            start_loc, row_of_token, positions = self._counting[: num_rows + 1], None, computed
            seq_lens = computed + 1
        else:
            start_loc = torch.tensor(starts, dtype=torch.int32, device=self.device)
            counts = start_loc.diff().to(torch.int64)
            rows = torch.arange(num_rows, device=self.device)
            row_of_token = torch.repeat_interleave(rows, counts, output_size=num_tokens)
            shift = (computed - start_loc[:-1]).index_select(0, row_of_token)
            positions = torch.arange(num_tokens, device=self.device) + shift
            seq_lens = computed + counts
        self.num_computed.index_copy_(0, slots, seq_lens)
        slot_of_token = slots if row_of_token is None else slots.index_select(0, row_of_token)
        input_ids = self.token_ids.view(-1).take(slot_of_token * self._stride + positions).to(torch.int64)
        longest = max(map(int.__sub__, starts[1:], starts))
        most = max(request.num_computed for request in requests)
        geometries = []
        for group, table in enumerate(self._tables):
            width = max(request.num_blocks[group] for request in requests)
            block_table = table[:, :width].index_select(0, slots)
            geometries.append(
                BatchGeometry(
                    query_start_loc=start_loc,
                    seq_lens=seq_lens.to(torch.int32),
                    block_table=block_table,
                    slot_mapping=self._slot_mapping(block_table, row_of_token, positions),
                    num_tokens=num_tokens,
                    num_requests=num_rows,
                    max_query_len=longest,
                    max_seq_len=most,
                    block_size=self.block_size,
                )
            )
        return StepInputs(requests, starts, before, slots, input_ids, positions, seq_lens, geometries)

    def write(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Puts drawn tokens (int64 [S]) where the next step reads them."""
        self.token_ids.view(-1).index_copy_(0, slots * self._stride + positions, token_ids.to(torch.int32))

    def tokens(self, request: BatchRequest, start: int, stop: int) -> Tensor:
        """A request's tokens start..stop: int64, on the device."""
        return self.token_ids[request.slot, start:stop].to(torch.int64)

    def _advance(self, scheduled: Sequence[ScheduledRequest]) -> tuple[list[BatchRequest], list[int], list[int]]:
        """Host bookkeeping of a step; refuses a plan that would read or write where nothing was allocated."""
        requests: list[BatchRequest] = []
        starts, before, total = [0], [], 0
        fresh: list[tuple[int, BatchRequest, list[int]]] = []
        known, block_size = self._requests, self.block_size
        for row in scheduled:
            request = known.get(row.request_id)
            if request is None:
                raise RuntimeError(f"request {row.request_id} is scheduled but was never added to the batch")
            if row.new_block_ids is not None:
                fresh += [(group, request, blocks) for group, blocks in enumerate(row.new_block_ids) if blocks]
                request.num_blocks = [n + len(b) for n, b in zip(request.num_blocks, row.new_block_ids, strict=True)]
            computed = request.num_computed
            after = computed + row.num_tokens
            if (
                row.num_tokens < 1
                or computed > row.num_scheduled_tokens_before
                or after > min(request.num_blocks) * block_size
            ):
                raise RuntimeError(
                    f"request {row.request_id}: {row.num_tokens} tokens after {computed} (the plan says "
                    f"{row.num_scheduled_tokens_before}) do not fit its {request.num_blocks} blocks of {block_size}"
                )
            request.num_computed = after
            requests.append(request)
            before.append(computed)
            total += row.num_tokens
            starts.append(total)
        if fresh:
            self._append_blocks(fresh)
        return requests, starts, before

    def _append_blocks(self, fresh: list[tuple[int, BatchRequest, list[int]]]) -> None:
        for group, table in enumerate(self._tables):
            slots: list[int] = []
            columns: list[int] = []
            values: list[int] = []
            for its_group, request, blocks in fresh:
                if its_group == group:
                    end = request.num_blocks[group]
                    slots += [request.slot] * len(blocks)
                    columns += range(end - len(blocks), end)
                    values += blocks
            if values:
                at = torch.tensor([slots, columns], dtype=torch.int64, device=self.device)
                table[at[0], at[1]] = torch.tensor(values, dtype=torch.int32, device=self.device)

    def _slots(self, requests: list[BatchRequest]) -> Tensor:
        slots = [request.slot for request in requests]
        if slots != self._last_slots:
            self._last_slots = slots
            self._last_slots_tensor = torch.tensor(slots, dtype=torch.int64, device=self.device)
        return self._last_slots_tensor

    def _slot_mapping(self, block_table: Tensor, row_of_token: Tensor | None, positions: Tensor) -> Tensor:
        columns = torch.div(positions, self.block_size, rounding_mode="floor")
        if row_of_token is None:
            blocks = block_table.gather(1, columns.unsqueeze(1)).squeeze(1)
        else:
            blocks = block_table.view(-1).take(row_of_token * block_table.shape[1] + columns)
        return blocks.to(torch.int64) * self.block_size + positions - columns * self.block_size
