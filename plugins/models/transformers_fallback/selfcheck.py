"""A last look before serving: the routed model must agree with transformers' own forward on a few tokens.
 Two short sequences are run, one of them in two steps, beside each other in one flat batch. Whatever the probe cannot
see shows here: state carried from token to token outside attention, tokens of one request that reach another's,
positions that are not taken from `position_ids`, a mask that mattered, a head that does more than it was thought to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotswap.core.contracts.attention import AttentionLayer
from hotswap.core.contracts.model import Model
from hotswap.core.layers.reference import attention

_LENGTHS = (6, 4)
_FIRST_CHUNK = 3  # tokens of the first sequence in step one, beside all of the second; the rest comes in step two
_TOLERANCE = {torch.float32: 1e-3}  # relative, per row of logits
_HALF_TOLERANCE = 0.2  # half precision: eager attention and ours round differently, and routers of experts may tip over


class _DenseContext:
    """A ForwardContext over plain lists of keys and values. `plan`: (sequence, tokens) of the step, in batch order."""

    def __init__(self) -> None:
        self.plan: list[tuple[int, int]] = []
        self._cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs, start = [], 0
        for sequence, count in self.plan:
            rows = slice(start, start + count)
            start += count
            slot = (layer.index, sequence)
            keys, values = key[rows], value[rows]
            if slot in self._cache:
                keys, values = torch.cat((self._cache[slot][0], keys)), torch.cat((self._cache[slot][1], values))
            self._cache[slot] = (keys, values)
            outputs.append(attention(query[rows], keys, values, layer).to(query.dtype))
        return torch.cat(outputs)


def sample_tokens(vocab_size: int) -> list[list[int]]:
    """The sequences of the check: ids spread over the vocabulary."""
    ids = [(7919 * (index + 1)) % max(vocab_size - 8, 1) + min(8, vocab_size - 1) for index in range(sum(_LENGTHS))]
    ids = [min(token, vocab_size - 1) for token in ids]
    return [ids[: _LENGTHS[0]], ids[_LENGTHS[0] :]]


def routed_logits(model: Model, sequences: Sequence[Sequence[int]], device: Any) -> list[Tensor]:
    """float32 logits [n, V] of each of the two sequences, through the engine's contract."""
    first, second = sequences
    context = _DenseContext()

    def step(token_ids: list[int], positions: list[int], plan: list[tuple[int, int]]) -> Tensor:
        context.plan = plan
        embeds = model.embed(torch.tensor(token_ids, device=device))
        return model.logits(model.forward(embeds, torch.tensor(positions, device=device), context))

    head = _FIRST_CHUNK
    one = step([*first[:head], *second], [*range(head), *range(len(second))], [(0, head), (1, len(second))])
    two = step(list(first[head:]), list(range(head, len(first))), [(0, len(first) - head)])
    return [torch.cat((one[:head], two)), one[head:]]


def disagreement(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error of any row of logits."""
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-30)
        worst = max(worst, float(error.max().nan_to_num(nan=float("inf"))))
    return worst


def tolerance(dtype: torch.dtype) -> float:
    """The largest disagreement that rounding explains."""
    return _TOLERANCE.get(dtype, _HALF_TOLERANCE)
