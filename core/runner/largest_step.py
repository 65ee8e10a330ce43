"""The largest step that the limits allow, run once before the KV cache is sized: what it takes is measured, not guessed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ..contracts.model import Model
from ..contracts.platform import Platform
from ..layers.ops import OpTable
from ..layers.sampling.draw import ALWAYS
from .kv_cache import CachePlan, allocate_cache
from .step_buffers import StepBuffers
from .step_context import GroupCache, StepContext
from .transfer import Transfers


class LargestStep:
    """Runs the model and the sampler over `num_tokens` made-up tokens of `num_rows` requests. The cache holds nothing but
    the null block: every context lies in it, and nothing is written."""

    def __init__(
        self,
        model: Model,
        groups: Sequence[GroupCache],
        ops: OpTable,
        platform: Platform,
        transfers: Transfers,
        block_size: int,
    ) -> None:
        self._model = model
        self._ops = ops
        self._transfers = transfers
        self._block_size = block_size
        bare = [served.group for served in groups]
        layouts = [served.backend.layout for served in groups]
        caches = allocate_cache(platform, bare, layouts, CachePlan(0, block_size, 0, "the null block"))
        self._context = StepContext(groups, caches, ops)
        self._num_groups = len(groups)

    @torch.inference_mode()
    def run(self, num_tokens: int, num_rows: int) -> None:
        buffers = self._buffers(num_tokens, num_rows)
        longest = -(-num_tokens // num_rows)
        self._context.prepare(buffers.geometries(self._block_size, longest, longest))
        hidden = self._model.forward(self._model.embed(buffers.input_ids), buffers.positions, self._context)
        last = (buffers.starts[1:] - 1).to(torch.int64)
        self._draw(self._model.logits(hidden.index_select(0, last)))

    def _draw(self, logits: torch.Tensor) -> None:
        """As for requests with an edit each and all filters."""
        edited = logits.clone()
        best, _ = self._ops.argmax(edited)
        zeros = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        self._ops.draw(
            edited,
            best,
            torch.ones_like(best),
            torch.full_like(best, 1e-3),
            zeros + ALWAYS,
            torch.full_like(best, 0.9, dtype=torch.float64),
            zeros,
            zeros,
            True,
        )

    def _buffers(self, num_tokens: int, num_rows: int) -> StepBuffers:
        """Tokens shared out evenly; every table points to the null block."""
        starts = [row * num_tokens // num_rows for row in range(num_rows + 1)]
        counts = [end - start for start, end in pairwise(starts)]
        width = -(-max(counts) // self._block_size)
        upload = self._transfers.upload
        slots = upload([0] * num_rows, torch.int32)
        buffers = StepBuffers.allocate(slots, upload(starts, torch.int32), num_tokens, [width] * self._num_groups)
        buffers.seq_lens = upload(counts, torch.int32)
        buffers.positions = upload([position for count in counts for position in range(count)], torch.int64)
        buffers.input_ids.zero_()
        for mapping, table in zip(buffers.slot_mappings, buffers.block_tables, strict=True):
            mapping.fill_(-1)
            table.zero_()
        return buffers
