"""A last look before serving, at what the probe cannot see. Two questions, on a few tokens of made-up sequences.
 Isolation: does a sequence's result depend on what lies beside it in the flat batch? It does wherever tokens are
mixed by anything but attention (a convolution, a recurrent state), for such code takes the batch for one sequence.
The shapes are the same in both runs, so the answer is exact in any dtype.
 Agreement: do the logits equal those of transformers' own forward? One sequence is run in two steps beside another.
What shows here: positions that are not taken from `position_ids`, a mask that mattered, a head that does more than
was thought.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotswap.core.contracts.attention import AttentionLayer
from hotswap.core.contracts.model import Model
from hotswap.core.layers.reference import attention, rope

_LENGTHS = (6, 4)
_FIRST_CHUNK = 3  # tokens of the first sequence in step one, beside all of the second; the rest comes in step two
# Relative, per row of logits. In half precision eager attention and ours round differently, and a router of experts may
# tip over in a row or two.
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.2
_HALF_ROWS_APART = 2
_ISOLATION_TOLERANCE = 1e-6
_EXPERTS_TOLERANCE = 0.02  # neighbours change how many tokens an expert gets, hence how its products are rounded


class _DenseContext:
    """A ForwardContext over plain lists of keys and values. `plan`: (sequence, tokens) of the step, in batch order."""

    def __init__(self) -> None:
        self.plan: list[tuple[int, int]] = []
        self._cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor | None = None,
        cos_sin: Tensor | None = None,
    ) -> Tensor:
        if positions is not None and cos_sin is not None:
            rope(query, key, positions, cos_sin)
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


class _Runner:
    """Runs steps of a model. `done`: how many tokens of each sequence are computed."""

    def __init__(self, model: Model, device: Any) -> None:
        self._model = model
        self._device = device
        self._context = _DenseContext()
        self._done: dict[int, int] = {}

    def step(self, batch: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """batch: (sequence, its next tokens). float32 logits [n, V] of each."""
        token_ids: list[int] = []
        positions: list[int] = []
        for sequence, tokens in batch:
            start = self._done.get(sequence, 0)
            self._done[sequence] = start + len(tokens)
            token_ids.extend(tokens)
            positions.extend(range(start, start + len(tokens)))
        self._context.plan = [(sequence, len(tokens)) for sequence, tokens in batch]
        embeds = self._model.embed(torch.tensor(token_ids, device=self._device))
        hidden = self._model.forward(embeds, torch.tensor(positions, device=self._device), self._context)
        return list(self._model.logits(hidden).split_with_sizes([len(tokens) for _, tokens in batch]))


def sample_tokens(vocab_size: int, lengths: Sequence[int] = _LENGTHS, seed: int = 1) -> list[list[int]]:
    """Sequences of ids spread over the vocabulary, its first few (often special) left out."""
    first = min(8, vocab_size - 1)
    ids = iter(first + 7919 * (seed + index) % (vocab_size - first) for index in range(sum(lengths)))
    return [[next(ids) for _ in range(length)] for length in lengths]


def routed_logits(model: Model, sequences: Sequence[Sequence[int]], device: Any) -> list[Tensor]:
    """float32 logits [n, V] of each of the two sequences, through the engine's contract."""
    first, second = sequences
    runner = _Runner(model, device)
    head, whole = runner.step([(0, first[:_FIRST_CHUNK]), (1, second)])
    (tail,) = runner.step([(0, first[_FIRST_CHUNK:])])
    return [torch.cat((head, tail)), whole]


def disagreement(found: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype) -> float | None:
    """The relative error of the logits where it is more than rounding in `dtype` explains, else None."""
    errors = sorted((error for pair in zip(found, expected, strict=True) for error in _row_errors(*pair)), reverse=True)
    exact = dtype == torch.float32
    worst = errors[0 if exact else _HALF_ROWS_APART]
    return worst if worst > (_TOLERANCE if exact else _HALF_TOLERANCE) else None


def leak(model: Model, vocab_size: int, device: Any, experts: bool) -> float | None:
    """How much a sequence's logits change (relatively) with the sequences around it; None when they do not."""
    (middle,) = sample_tokens(vocab_size, (4,))
    results = []
    for seed in (17, 23):
        before, after = sample_tokens(vocab_size, (5, 3), seed)
        results.append(_Runner(model, device).step([(0, before), (1, middle), (2, after)])[1])
    worst = max(_row_errors(*results))
    return worst if worst > (_EXPERTS_TOLERANCE if experts else _ISOLATION_TOLERANCE) else None


def _row_errors(found: Tensor, expected: Tensor) -> list[float]:
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    errors: list[float] = error.nan_to_num(nan=float("inf")).tolist()
    return errors
