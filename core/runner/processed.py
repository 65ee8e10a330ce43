"""Logits as they are drawn from, for `--logprobs-mode processed_logprobs`: slow and plain, a few rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.sampling.slices import SORTED, slices
from .sampling_rows import DrawGroup, SamplingBatch


def processed_logits(logits: Tensor, edited: Tensor | None, batch: SamplingBatch) -> Tensor:
    """`logits`, float32 [S, V], overwritten by the edited ones over the temperature, minus infinity for what min_p, top_k and
    top_p leave out.

    edited: float32 [E, V], what `sample` made of the rows `batch.edits.rows`. A greedy row is edited only: it has no
    temperature and no filter.
    """
    if edited is not None and batch.edits is not None:
        logits.index_copy_(0, batch.edits.rows, edited)
    for group in batch.groups:
        for part in slices(len(group.rows), logits.shape[1], SORTED):
            rows = group.rows[part]
            logits.index_copy_(0, rows, _filtered(logits.index_select(0, rows), group, part))
    return logits


def _filtered(logits: Tensor, group: DrawGroup, part: slice) -> Tensor:
    """The definition that draw.py takes short cuts through (see its docstring). logits: of the group's rows `part`."""
    scaled = (logits - logits.amax(1, keepdim=True)) / group.temperature[part].unsqueeze(1)
    values, ids = torch.sort(scaled, dim=1, descending=True, stable=True)
    weights = values.to(torch.float64).exp()
    kept = torch.arange(logits.shape[1], device=logits.device) < group.top_k[part].unsqueeze(1)
    if group.min_p is not None:
        kept &= weights >= group.min_p[part].unsqueeze(1)
    weights.masked_fill_(~kept, 0.0)
    cumulative = weights.cumsum(1)
    kept &= (cumulative - weights) < group.top_p[part].unsqueeze(1) * cumulative[:, -1:]
    kept[:, 0] = True
    values.masked_fill_(~kept, float("-inf"))
    return scaled.scatter_(1, ids, values)
