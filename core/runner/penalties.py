"""Repetition, presence and frequency penalties: token counts per request, kept on the device and updated token by
token.

Only requests that ask for a penalty take a row, so the others cost no time. The memory is there for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers.ops import OpTable
from ..sampling_params import SamplingParams
from .transfer import Transfers

_FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class Penalties:
    """One request's settings. repetition 1 and the others 0 are off."""

    repetition: float
    presence: float
    frequency: float


def penalties_of(params: SamplingParams) -> Penalties | None:
    """None when the request asks for none."""
    found = Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return None if found == Penalties(1.0, 0.0, 0.0) else found


class PenaltyPool:
    """What each penalised request's tokens have cost so far. Rows are handed out, freed and reused. Kept per token: how often
    it was drawn, what its logit is divided by, what is taken off it; 12 bytes.

    rows: there is room for so many at once, taken now, so that a server which has filled the device has it when it is needed
    (a host's memory is not touched before). With more than that the pool doubles.
    """

    def __init__(self, logits_width: int, transfers: Transfers, rows: int = _FEW_ROWS) -> None:
        self._width = logits_width
        self._transfers = transfers
        self._counts = self._empty(rows, logits_width, torch.int32)
        self._divisors = self._empty(rows, logits_width, torch.float32)
        self._amounts = self._empty(rows, logits_width, torch.float32)
        self._penalties = self._empty(rows, 3, torch.float32)  # repetition, presence, frequency
        self._free = list(range(rows - 1, -1, -1))

    def __len__(self) -> int:
        """Rows in use."""
        return len(self._counts) - len(self._free)

    def add(self, penalties: Penalties, prompt_ids: Tensor, output_ids: Tensor) -> int:
        """Takes a row for a request with these tokens (integer tensors on the device); returns its number."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        in_prompt = self._count(prompt_ids) > 0
        counts = self._count(output_ids)
        drawn = counts > 0
        self._counts[row] = counts
        self._divisors[row] = torch.ones_like(self._divisors[row]).masked_fill_(in_prompt | drawn, penalties.repetition)
        self._amounts[row] = penalties.frequency * counts + penalties.presence * drawn
        settings = (penalties.repetition, penalties.presence, penalties.frequency)
        self._penalties[row] = self._transfers.upload(settings, torch.float32)
        return row

    def remove(self, row: int) -> None:
        self._free.append(row)

    def record(self, rows: Tensor, token_ids: Tensor) -> None:
        """Counts one drawn token for each of rows int64 [P] (all different)."""
        at = (rows, token_ids)
        counts = self._counts[at] + 1
        repetition, presence, frequency = self._penalties.index_select(0, rows).unbind(1)
        self._counts[at] = counts
        self._divisors[at] = repetition
        self._amounts[at] = frequency * counts + presence

    def clear(self) -> None:
        """Frees every row."""
        self._free = list(range(self._counts.shape[0]))

    def apply(self, logits: Tensor, local: Tensor, rows: Tensor, ops: OpTable) -> None:
        """Penalises rows `local` int64 [P] of logits [E, V] in place by the pool rows `rows` int64 [P].

        Repetition (HF's definition): a token seen in prompt or output has a positive logit divided, a negative one
        multiplied. Presence and frequency (OpenAI's): minus presence once, minus frequency times the count, for tokens
        of the output.
        """
        ops.penalize(logits, local, rows, self._divisors, self._amounts)

    def _count(self, token_ids: Tensor) -> Tensor:
        """How often each token is among integer token_ids: int32 [V]. Not `bincount`: a GPU would have to be waited for.

        A prompt may hold ids beyond the logits (padded embeddings): no penalty can apply to what cannot be drawn.
        """
        counts = torch.zeros(self._width + 1, dtype=torch.int32, device=self._transfers.device)
        at = token_ids.to(torch.int64).clamp(max=self._width)
        return counts.scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32))[: self._width]

    def _empty(self, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """A row is written whole when it is taken."""
        return torch.empty((rows, width), dtype=dtype, device=self._transfers.device)

    def _grow(self) -> None:
        old = self._counts.shape[0]
        new = 2 * old
        for name in ("_counts", "_divisors", "_amounts", "_penalties"):
            before: Tensor = getattr(self, name)
            after = self._empty(new, before.shape[1], before.dtype)
            after[:old] = before
            setattr(self, name, after)
        self._free.extend(range(new - 1, old - 1, -1))
