"""The persistent batch: one slot a request, filled at admission, updated by each plan's deltas, never rebuilt.

    token_ids[slot]:  |<------- prompt ------->|<-- outputs -->|  unused ...
                      0                        num_prompt      next position to draw

A drawn token is written at its position on the device, and the next step gathers its input from there: a plan can be
made and applied before the host knows the token. Positions, sequence lengths and slots derive from `num_computed` on
the device (the op `step_inputs`). One slot more than there are seats takes what padding rows write.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..contracts.attention import BatchGeometry
from ..contracts.plan import NewRequest, ScheduledRequest
from ..layers.ops import OpTable
from .step_buffers import StepBuffers
from .transfer import Transfers


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
class StepRows:
    """The host's side of one step: R rows in plan order, T tokens.

    starts: first token of each row in the flat batch, and T at the end. before: tokens computed before this step, per
        row. max_query_len, max_seq_len: the largest of the step. widths: block-table columns in use, per cache group.
    """

    requests: list[BatchRequest]
    starts: list[int]
    before: list[int]
    max_query_len: int
    max_seq_len: int
    widths: list[int]

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    @property
    def is_decode(self) -> bool:
        """Whether every row is one token."""
        return self.starts[-1] == len(self.requests)


class InputBatch:
    """Not thread-safe: the worker's thread only.

    max_model_len bounds a request's tokens; one more column takes a token drawn past it, which nobody will read.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        ops: OpTable,
        transfers: Transfers,
    ) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self._ops = ops
        self._transfers = transfers
        device = self.device = transfers.device
        self.stride = max_model_len + 1
        self.max_blocks = -(-max_model_len // block_size) + 1
        num_slots = max_num_seqs + 1
        # Never read beyond what was written, so left unset: a CPU then backs only the pages in use.
        self.token_ids = torch.empty((num_slots, self.stride), dtype=torch.int32, device=device)
        self.token_ids[max_num_seqs] = 0
        self.num_computed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.num_prompt_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.tables = tuple(
            torch.zeros((num_slots, self.max_blocks), dtype=torch.int32, device=device) for _ in range(num_groups)
        )
        self._requests: dict[int, BatchRequest] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._last_rows: list[int] = []  # slots and starts of the step before: decode steps repeat them
        self._last_upload = torch.zeros(0, dtype=torch.int32, device=device)

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

    def add(self, news: Sequence[NewRequest]) -> list[BatchRequest]:
        """Fills slots, all with one upload. Raises RuntimeError on a plan that cannot be right: no seat left, known
        already, too long."""
        if not news:
            return []
        added = [self._seat(new) for new in news]
        slots = np.array([request.slot for request in added], dtype=np.int64)
        tokens = [np.frombuffer(array("i", new.token_ids), dtype=np.int32) for new in news]
        places = np.concatenate([s * self.stride + np.arange(len(t)) for s, t in zip(slots, tokens, strict=True)])
        facts = np.array([[new.num_computed_tokens, new.num_prompt_tokens] for new in news], dtype=np.int64)
        up = self._transfers.array
        at, counts = up(slots), up(facts)
        self.token_ids.view(-1).index_copy_(0, up(places), up(np.concatenate(tokens)))
        self.num_computed.index_copy_(0, at, counts[:, 0])
        self.num_prompt_tokens.index_copy_(0, at, counts[:, 1])
        fresh: list[tuple[int, BatchRequest, list[int]]] = []
        for group, table in enumerate(self.tables):
            table.index_fill_(0, at, 0)
            fresh += [(group, request, new.block_ids[group]) for request, new in zip(added, news, strict=True)]
        self._append_blocks(fresh)
        return added

    def _seat(self, new: NewRequest) -> BatchRequest:
        if new.request_id in self._requests:
            raise RuntimeError(f"request {new.request_id} is in the batch already")
        if not self._free:
            raise RuntimeError(f"request {new.request_id} has no seat: all {self.max_num_seqs} are taken")
        if len(new.token_ids) >= self.stride:
            raise RuntimeError(
                f"request {new.request_id} has {len(new.token_ids)} tokens; at most {self.stride - 1} fit"
            )
        request = BatchRequest(
            new.request_id,
            self._free.pop(),
            new.num_prompt_tokens,
            new.num_computed_tokens,
            [len(blocks) for blocks in new.block_ids],
        )
        self._requests[new.request_id] = request
        return request

    def advance(self, scheduled: Sequence[ScheduledRequest]) -> StepRows:
        """The host's bookkeeping of a step: appends its new blocks and counts its tokens as computed. Raises RuntimeError
        on a plan that would read or write where nothing was allocated."""
        requests: list[BatchRequest] = []
        starts, before, total = [0], [], 0
        fresh: list[tuple[int, BatchRequest, list[int]]] = []
        known, block_size = self._requests, self.block_size
        longest = most = 0
        for row in scheduled:
            request = known.get(row.request_id)
            if request is None:
                raise RuntimeError(f"request {row.request_id} is scheduled but was never added to the batch")
            if row.new_block_ids is not None:
                fresh += [(group, request, blocks) for group, blocks in enumerate(row.new_block_ids) if blocks]
                request.num_blocks = [n + len(b) for n, b in zip(request.num_blocks, row.new_block_ids, strict=True)]
            computed, num_tokens = request.num_computed, row.num_tokens
            after = computed + num_tokens
            if (
                num_tokens < 1
                or computed > row.num_scheduled_tokens_before
                or after > min(request.num_blocks) * block_size
            ):
                raise RuntimeError(
                    f"request {row.request_id}: {num_tokens} tokens after {computed} (the plan says "
                    f"{row.num_scheduled_tokens_before}) do not fit its {request.num_blocks} blocks of {block_size}"
                )
            request.num_computed = after
            requests.append(request)
            before.append(computed)
            total += num_tokens
            starts.append(total)
            longest, most = max(longest, num_tokens), max(most, after)
        if fresh:
            self._append_blocks(fresh)
        widths = [max(request.num_blocks[group] for request in requests) for group in range(len(self.tables))]
        return StepRows(requests, starts, before, longest, most, widths)

    def lay_out(self, rows: StepRows) -> StepBuffers:
        """A step's inputs in new tensors: T tokens, R rows."""
        packed = [request.slot for request in rows.requests] + rows.starts
        if packed != self._last_rows:
            self._last_rows = packed
            self._last_upload = self._transfers.upload(packed, torch.int32)
        num_rows = len(rows.requests)
        slots, starts = self._last_upload[:num_rows], self._last_upload[num_rows:]
        buffers = StepBuffers.allocate(slots, starts, rows.num_tokens, rows.widths)
        self.fill(buffers)
        return buffers

    def fill(self, buffers: StepBuffers) -> None:
        """Works out a step's inputs on the device, and counts its tokens as computed there too."""
        self._ops.step_inputs(
            buffers.slots,
            buffers.starts,
            self.num_computed,
            self.token_ids,
            self.tables,
            self.block_size,
            buffers.input_ids,
            buffers.positions,
            buffers.seq_lens,
            buffers.slot_mappings,
            buffers.block_tables,
        )

    def geometries(self, buffers: StepBuffers, rows: StepRows) -> list[BatchGeometry]:
        return buffers.geometries(self.block_size, rows.max_query_len, rows.max_seq_len)

    def write(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Puts drawn tokens (int64 [S]) where the next step reads them."""
        self.token_ids.view(-1).index_copy_(0, slots * self.stride + positions, token_ids.to(torch.int32))

    def tokens(self, request: BatchRequest, start: int, stop: int) -> Tensor:
        """A request's tokens start..stop: int64, on the device."""
        return self.token_ids[request.slot, start:stop].to(torch.int64)

    def _append_blocks(self, fresh: Sequence[tuple[int, BatchRequest, list[int]]]) -> None:
        for group, table in enumerate(self.tables):
            places: list[int] = []
            values: list[int] = []
            for its_group, request, blocks in fresh:
                if its_group == group:
                    end = request.slot * self.max_blocks + request.num_blocks[group]
                    places += range(end - len(blocks), end)
                    values += blocks
            if values:
                at = self._transfers.upload([places, values], torch.int64)
                table.view(-1).index_copy_(0, at[0], at[1].to(torch.int32))
