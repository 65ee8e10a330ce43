"""Changes to the logits before temperature and filters, in a fixed order (see `sampler`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers.ops import OpTable
from ..layers.sampling.slices import COPIED, slices
from .penalties import PenaltyPool
from .sampling_rows import Edits

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class History:
    """Where the S sampling rows stand. token_ids: [slots, stride] on the device, written up to `positions` (exclusive).

    slots, positions, num_prompt_tokens: int64 [S]; a row's next token goes to `positions`.
    """

    token_ids: Tensor
    slots: Tensor
    positions: Tensor
    num_prompt_tokens: Tensor


def apply_edits(logits: Tensor, edits: Edits, history: History, pool: PenaltyPool, ops: OpTable) -> None:
    """Edits logits float32 [E, V] in place: the rows `edits.rows` of the step's sampling rows, in that order."""
    positions = history.positions.index_select(0, edits.rows)
    num_outputs = positions - history.num_prompt_tokens.index_select(0, edits.rows)
    if edits.allowed is not None:
        _allow(logits, *edits.allowed)
    if edits.words is not None:
        _ban_words(logits, edits, history, positions, num_outputs)
    if edits.until is not None:
        at, ids, thresholds = edits.until
        _ban(logits, at, ids, num_outputs.index_select(0, at) < thresholds)
    if edits.bias is not None:
        at, ids, values = edits.bias
        _flat(logits).scatter_add_(0, at * logits.shape[1] + ids, values)  # pairs are all different
    if edits.forced is not None:
        _force(logits, *edits.forced)
    if edits.penalties is not None:
        pool.apply(logits, *edits.penalties, ops)


def _allow(logits: Tensor, at: Tensor, masks: Tensor) -> None:
    """Puts minus infinity where a row's mask is False."""
    for part in slices(len(at), logits.shape[1], COPIED):
        rows = at[part]
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(~masks[part], NEVER))


def _ban(logits: Tensor, at: Tensor, ids: Tensor, condition: Tensor) -> None:
    """Puts minus infinity where the condition holds. A minimum lets pairs repeat, some with the condition and some without;
    an addition would too, but a GPU sorts the pairs for it."""
    limit = torch.full(condition.shape, math.inf, dtype=logits.dtype, device=logits.device)
    places = at * logits.shape[1] + ids
    _flat(logits).scatter_reduce_(0, places, limit.masked_fill_(condition, NEVER), "amin")


def _flat(logits: Tensor) -> Tensor:
    """[E * V], over the same memory."""
    return logits.view(-1)


def _ban_words(logits: Tensor, edits: Edits, history: History, positions: Tensor, num_outputs: Tensor) -> None:
    """Bans a word's last token where the output (the prompt does not count) ends in the rest of it."""
    if edits.words is None:
        return
    at, last, prefixes, lengths = edits.words
    stride = history.token_ids.shape[1]
    back = torch.arange(-prefixes.shape[1], 0, device=logits.device)
    places = positions.unsqueeze(1) + back  # [E, L]
    slots = history.slots.index_select(0, edits.rows).unsqueeze(1)
    recent = history.token_ids.view(-1).take(slots * stride + places.clamp_(min=0))
    same = (recent.index_select(0, at) == prefixes) | (prefixes < 0)
    _ban(logits, at, last, same.all(1) & (num_outputs.index_select(0, at) >= lengths))


def _force(logits: Tensor, at: Tensor, ids: Tensor) -> None:
    """Leaves only a row's forced tokens, where at least one of them may be drawn. Without a matrix of any kind: all is taken
    from the row, and they are put back."""
    places = at * logits.shape[1] + ids
    values = _flat(logits).take(places)
    best = torch.full((len(logits),), NEVER, dtype=logits.dtype, device=logits.device)
    best.scatter_reduce_(0, at, torch.where(values > NEVER, values, NEVER), "amax")
    logits.masked_fill_((best > NEVER).unsqueeze(1), NEVER)
    _flat(logits).index_copy_(0, places, values)
