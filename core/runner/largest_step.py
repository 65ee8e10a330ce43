"""The largest step that the limits allow, run once before the KV cache is sized: what it takes is measured, not guessed. And
smaller ones, so that no kernel is compiled while requests wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor

from ..contracts.model import ForwardContext, Model
from ..contracts.platform import Platform
from ..layers.ops import OpTable
from .kv_cache import CachePlan, allocate_cache
from .prompt_logprobs import SLICE, describe_hidden
from .step_buffers import StepBuffers
from .step_context import GroupCache, StepContext
from .transfer import Transfers
from .trial_sampling import SamplingDemands, try_sampling
from .warm_up import TryingContext, claims, doubled

_SMALL_STEP = 512  # tokens above which no product has a shape of its own


def just_below(most: int) -> list[int]:
    """Numbers of tokens, the most first, at which a step may take more memory than one of `most`: kernels that need less are
    chosen from powers of two on, and save a factor of less than four."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return [power - 1 for power in reversed(powers) if power > max(1, most // 4)]


class LargestStep:
    """Runs the model and the sampler over made-up tokens of as many requests as asked for. The cache holds nothing but the null
    block: every context lies in it, and nothing is written."""

    def __init__(
        self,
        model: Model,
        groups: Sequence[GroupCache],
        ops: OpTable,
        platform: Platform,
        transfers: Transfers,
        block_size: int,
        max_model_len: int,
        demands: SamplingDemands,
    ) -> None:
        self._model = model
        self._ops = ops
        self._transfers = transfers
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._demands = demands
        bare = [served.group for served in groups]
        layouts = [served.backend.layout for served in groups]
        caches = allocate_cache(platform, bare, layouts, CachePlan(0, block_size, 0, "the null block"))
        self._context = StepContext(groups, caches, ops)
        self._num_groups = len(groups)

    @torch.inference_mode()
    def run(
        self,
        num_tokens: int,
        num_rows: int,
        around_sampling: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """All of it: a token for each row by everything that a request may ask for, and a prompt's log-probabilities.

        around_sampling: makes what is entered for what grows with the rows, not with the tokens.
        """
        buffers, longest = self._buffers(num_tokens, num_rows)
        self._context.prepare(buffers.geometries(self._block_size, longest, longest))
        hidden, last = self._hidden(buffers, self._context)
        with around_sampling():
            try_sampling(self._model.logits(last), self._demands, self._ops, self._transfers)
        described = hidden[:SLICE]
        tokens = torch.zeros(len(described), dtype=torch.int64, device=hidden.device)
        describe_hidden(described, tokens, self._demands.max_logprobs, self._model, self._ops, self._transfers)

    @torch.inference_mode()
    def decode(self, num_tokens: int, num_rows: int) -> None:
        """As far as a graph goes: to the best token of each row."""
        buffers, longest = self._buffers(num_tokens, num_rows)
        self._context.prepare(buffers.geometries(self._block_size, longest, longest))
        _, last = self._hidden(buffers, self._context)
        self._ops.argmax(self._model.logits(last))

    @torch.inference_mode()
    def warm_up(self, max_tokens: int, max_rows: int, graph_tokens: int) -> None:
        """Compiles what serving may need beside the largest step: attention for other rows and contexts, and all else for steps
        of few tokens. Those of up to `graph_tokens` are left to graphs, whose capture compiles what they need."""
        most = min(max_tokens, max(2 * max_rows, _SMALL_STEP))
        for num_tokens in [size for size in doubled(1, most) if size > graph_tokens or size == most]:
            num_rows = min(num_tokens, max_rows)
            buffers, longest = self._buffers(num_tokens, num_rows)
            geometry = (self._block_size, longest, self._max_model_len)
            trials = []
            if num_tokens in (1, most):
                trials = list(claims(num_tokens, num_rows, self._max_model_len))
            hidden, _ = self._hidden(buffers, TryingContext(self._context, buffers, *geometry, trials, self._transfers))
        # Fewer rows draw a token than there are, and a prompt is described a slice at a time.
        for num_rows in doubled(1, min(most, max(max_rows, SLICE))):
            self._ops.argmax(self._model.logits(hidden[:num_rows]))

    def _hidden(self, buffers: StepBuffers, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Hidden states of all tokens, and of each row's last one."""
        hidden = self._model.forward(self._model.embed(buffers.input_ids), buffers.positions, context)
        return hidden, hidden.index_select(0, (buffers.starts[1:] - 1).to(torch.int64))

    def _buffers(self, num_tokens: int, num_rows: int) -> tuple[StepBuffers, int]:
        """Tokens shared out evenly, and the most of a row. Tables are as wide as any, and point to the null block."""
        starts = [row * num_tokens // num_rows for row in range(num_rows + 1)]
        longest = max(end - start for start, end in pairwise(starts))
        width = -(-max(longest, self._max_model_len) // self._block_size)
        upload = self._transfers.upload
        slots = upload(list(range(num_rows)), torch.int32)
        buffers = StepBuffers.allocate(slots, upload(starts, torch.int32), num_tokens, [width] * self._num_groups)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=slots.device)

        self._ops.step_inputs(
            slots,
            buffers.starts,
            zeros(num_rows, dtype=torch.int64),
            zeros(num_rows, longest),
            tuple(zeros(num_rows, width) for _ in range(self._num_groups)),
            self._block_size,
            buffers.input_ids,
            buffers.positions,
            buffers.seq_lens,
            buffers.slot_mappings,
            buffers.block_tables,
        )
        for mapping in buffers.slot_mappings:
            mapping.fill_(-1)
        return buffers, longest
