"""Repetition, presence and frequency penalties: token counts per request, kept on the device and updated token by token.

Only requests that ask for a penalty take a row, so the others cost neither memory nor time.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_CAPACITY = 8


class PenaltyPool:
    """Counts of the tokens each penalised request has seen. Rows are handed out, freed and reused; the pool grows by doubling."""

    def __init__(self, logits_width: int, device: str) -> None:
        self._width = logits_width
        self._device = device
        self._output_counts = torch.zeros((0, logits_width), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((0, logits_width), dtype=torch.bool, device=device)
        self._free: list[int] = []

    def add(self, prompt_ids: Tensor, output_ids: Tensor) -> int:
        """Takes a row for a request with these tokens (integer tensors on the device); returns its number."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        # A prompt may hold ids beyond the logits (padded embeddings): no penalty can apply to what cannot be drawn.
        self._in_prompt[row] = torch.bincount(prompt_ids, minlength=self._width)[: self._width] > 0
        self._output_counts[row] = torch.bincount(output_ids, minlength=self._width)[: self._width].to(torch.int32)
        return row

    def remove(self, row: int) -> None:
        self._free.append(row)

    def record(self, rows: Tensor, token_ids: Tensor) -> None:
        """Counts one drawn token for each of rows int64 [P] (all different)."""
        self._output_counts[rows, token_ids] += 1

    def clear(self) -> None:
        """Frees every row."""
        self._free = list(range(self._output_counts.shape[0]))

    def apply(
        self, logits: Tensor, local: Tensor, rows: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> None:
        """Penalises rows `local` int64 [P] of logits [E, V] in place by the counts in pool rows `rows` int64 [P].

        Repetition (HF's definition): a token seen in prompt or output has a positive logit divided, a negative one multiplied.
        Presence and frequency (OpenAI's): minus presence once, minus frequency times the count, for tokens of the output.
        """
        counts = self._output_counts.index_select(0, rows)
        drawn = counts > 0
        seen = self._in_prompt.index_select(0, rows).logical_or_(drawn)
        values = logits.index_select(0, local)
        factor = repetition.unsqueeze(1)
        values = torch.where(seen, torch.where(values > 0, values / factor, values * factor), values)
        values -= frequency.unsqueeze(1) * counts
        values -= presence.unsqueeze(1) * drawn
        logits.index_copy_(0, local, values)

    def _grow(self) -> None:
        old = self._output_counts.shape[0]
        new = max(_FIRST_CAPACITY, 2 * old)
        for name in ("_output_counts", "_in_prompt"):
            before: Tensor = getattr(self, name)
            after = torch.zeros((new, self._width), dtype=before.dtype, device=self._device)
            after[:old] = before
            setattr(self, name, after)
        self._free.extend(range(new - 1, old - 1, -1))
