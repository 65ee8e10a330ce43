"""Draws tokens: one for each row of logits, each as if it were alone in the batch.

Order of processing, in float32 whatever the model's dtype:
  logits -> allowed tokens and grammar mask -> bad words -> tokens masked until min_tokens (all end-of-sequence and stop
  ids), by ignore_eos, or by a logit_bias of -100 -> logit_bias (added; 100 also excludes all other tokens) ->
  repetition, frequency and presence penalties -> logits processors -> temperature -> min_p -> top_k -> top_p -> draw.
Greedy rows (temperature below 1e-5, or top_k 1) take the largest logit after all edits, the lowest id among equal
ones. Reported log-probabilities are the raw model's, before all of this, unless the operator wants them after it
(processed.py).

Rows are grouped by what they ask for, and a row pays only for its own features; every operation works within a row, so
batch mates cannot change a result, not even in the last bit. A row whose logits are NaN is reported and harms no other.

On a device that works asynchronously nothing here waits for it: shapes follow from the batch, which the host knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers.ops import OpTable
from .edits import History, apply_edits
from .penalties import PenaltyPool
from .sampling_rows import DrawGroup, SamplingBatch

FAULTS = (
    None,
    "the model's logits are not finite (NaN or infinity)",
    "no token can be drawn: allowed_token_ids, bad_words, logit_bias, min_tokens, ignore_eos and penalties together exclude "
    "all, or leave a logit that is not finite",
)
NOT_FINITE, NOTHING_LEFT = 1, 2


@dataclass(frozen=True, slots=True)
class Drawn:
    """token_ids: int64 [S], always valid ids. faults: int64 [S], an index of FAULTS; 0 is no fault. edited: float32 [E, V],
    the rows `batch.edits.rows` as they were drawn from; None when no row is edited."""

    token_ids: Tensor
    faults: Tensor
    edited: Tensor | None = None


def sample(
    logits: Tensor,
    batch: SamplingBatch,
    history: History,
    pool: PenaltyPool,
    ops: OpTable,
    *,
    found: tuple[Tensor, Tensor] | None = None,
    overwrite: bool = False,
    process: Callable[[Tensor], Tensor] | None = None,
) -> Drawn:
    """logits: float32 [S, V], kept as they are unless `overwrite` allows edits in place (a copy less when every row is
    edited). found: what the op `argmax` gives for them, where that is known. process: the logits processors' work on the
    edited rows [E, V]. Updates the counts that penalties need with the drawn tokens."""
    best, token_ids = ops.argmax(logits) if found is None else found
    faults = _not_finite(best)
    edited, edited_best = logits, best
    if batch.edits is not None:
        in_place = overwrite and len(batch.edits.rows) == len(logits)
        edited = logits if in_place else logits.index_select(0, batch.edits.rows)
        apply_edits(edited, batch.edits, history, pool, ops)
        if process is not None:
            edited = process(edited)
        edited_best, edited_ids = ops.argmax(edited)
        token_ids = token_ids.index_copy(0, batch.edits.rows, edited_ids)
        before = faults.index_select(0, batch.edits.rows)
        nothing_left = _not_finite(edited_best) * NOTHING_LEFT
        faults = faults.index_copy(0, batch.edits.rows, torch.where(before > 0, before, nothing_left))
    for group in batch.groups:
        source, source_best = (edited, edited_best) if group.edited else (logits, best)
        token_ids = token_ids.index_copy(0, group.rows, _draw(source, source_best, group, history, ops))
    if batch.edits is not None and batch.edits.penalties is not None:
        at, pool_rows = batch.edits.penalties
        pool.record(pool_rows, token_ids.index_select(0, batch.edits.rows.index_select(0, at)))
    return Drawn(token_ids, faults, None if batch.edits is None else edited)


def _not_finite(values: Tensor) -> Tensor:
    """int64, 1 where a value is NaN or infinite: less itself it is NaN then, which equals nothing."""
    return torch.ne(values - values, 0.0).to(torch.int64)


def _draw(logits: Tensor, best: Tensor, group: DrawGroup, history: History, ops: OpTable) -> Tensor:
    if group.source is not None:
        logits, best = logits.index_select(0, group.source), best.index_select(0, group.source)
    positions = history.positions.index_select(0, group.rows)
    return ops.draw(
        logits,
        best,
        group.temperature,
        group.min_p,
        group.top_k,
        group.top_p,
        group.seeds,
        positions,
        group.ordered,
    )


def describe_faults(faults: Sequence[int]) -> list[str | None]:
    """Sentences for `Drawn.faults` brought to the host."""
    return [FAULTS[fault] for fault in faults]
