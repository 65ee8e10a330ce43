"""Sampling that asks for everything at once, before serving: what it takes at most is measured then, and none of its kernels
is compiled or loaded later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..layers.ops import OpTable
from ..layers.sampling.draw import ALWAYS
from ..sampling_params import SamplingParams
from .edits import History
from .penalties import Penalties, PenaltyPool
from .processed import processed_logits
from .sampler import sample
from .sampling_rows import SamplingRow, build_batch, resolve_row
from .transfer import Transfers

# Every edit and every filter, over token 0 alone, which stays possible.
_EVERYTHING = SamplingParams(
    temperature=0.5,
    top_p=0.9,
    top_k=2,
    min_p=0.01,
    seed=1,
    allowed_token_ids=[0],
    logit_bias={0: 100.0},
    min_tokens=1,
    eos_token_ids=[0],
    bad_words_token_ids=[[1, 0]],
    logprobs=0,
)
_PENALTIES = Penalties(1.1, 0.1, 0.1)


@dataclass(frozen=True, slots=True)
class SamplingDemands:
    """What the operator allows requests to ask for. max_logprobs: alternatives. processed_logprobs: as `--logprobs-mode` says.
    processors: whether there are logits processors."""

    max_logprobs: int
    processed_logprobs: bool = False
    processors: bool = False


def try_sampling(logits: Tensor, demands: SamplingDemands, ops: OpTable, transfers: Transfers) -> None:
    """Steps whose rows ask for all that `demands` allows, and one of a row that is drawn plainly. logits: float32 [S, V],
    overwritten.

    They go through `sample` and what ModelRunner does around it. All rows share a row of penalties: the pool is not a step's.
    """
    trial = _Trial(logits.shape[1], demands, ops, transfers)
    rows = trial.demanding_rows(len(logits))
    trial.step(logits, rows)
    # One that is drawn in another way and reports nothing: the others are then no longer "all rows", and are copied.
    trial.step(logits, [*rows[:-1], replace(rows[-1], top_p=1.0, top_k=ALWAYS, logprobs=None)])
    trial.step(logits[:1], [trial.plain_row()])


class _Trial:
    def __init__(self, width: int, demands: SamplingDemands, ops: OpTable, transfers: Transfers) -> None:
        self._width = width
        self._demands = demands
        self._ops = ops
        self._transfers = transfers
        self._pool = PenaltyPool(width, transfers, 1)
        tokens = transfers.upload([0], torch.int64)
        self._penalty_row = self._pool.add(_PENALTIES, tokens, tokens)

    def demanding_rows(self, count: int) -> list[SamplingRow]:
        row = resolve_row(
            _EVERYTHING, 0, self._width, self._transfers, self._penalty_row, processed=self._demands.processors
        )
        row = replace(row, logprobs=self._demands.max_logprobs)
        mask = row.allowed
        if mask is None:
            raise RuntimeError("a row of allowed tokens has no mask")
        return [replace(row, allowed=mask.clone()) for _ in range(count)]  # each request has its own

    def plain_row(self) -> SamplingRow:
        return resolve_row(SamplingParams(seed=1), 0, self._width, self._transfers, None)

    def step(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        transfers, ops = self._transfers, self._ops
        batch = build_batch(rows, {}, self._width, transfers)
        drawn = sample(logits, batch, self._history(len(rows)), self._pool, ops, process=self._process())
        if not batch.logprob_rows:
            return
        if self._demands.processed_logprobs:
            logits = processed_logits(logits, drawn.edited, batch)
        at = transfers.upload(batch.logprob_rows, torch.int64)
        chosen = drawn.token_ids.index_select(0, at)
        transfers.download(*ops.gather_logprobs(logits.index_select(0, at), chosen, max(batch.num_logprobs)))

    def _history(self, count: int) -> History:
        """A prompt of one token and one output token, both 0."""
        upload = self._transfers.upload
        return History(
            upload([[0, 0, 0]] * count, torch.int32),
            upload(list(range(count)), torch.int64),
            upload([2] * count, torch.int64),
            upload([1] * count, torch.int64),
        )

    def _process(self) -> Callable[[Tensor], Tensor] | None:
        """What ProcessorChain takes for a processor: a copy of its rows, and one that it works on."""
        if not self._demands.processors:
            return None
        return lambda edited: edited.clone().clone()
