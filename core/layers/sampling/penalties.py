"""The op `penalize`: what repetition, presence and frequency penalties do to logits."""

from __future__ import annotations

import torch
from torch import Tensor


def penalize(logits: Tensor, local: Tensor, rows: Tensor, divisors: Tensor, amounts: Tensor) -> None:
    """The op of that name in contracts/kernels.py. Repetition (HF's definition): a token seen in prompt or output has a
    positive logit divided, a negative one multiplied. Presence and frequency (OpenAI's) are taken off."""
    values = logits.index_select(0, local)
    factors = divisors.index_select(0, rows)
    values = torch.where(values > 0, values / factors, values.mul_(factors))
    values -= amounts.index_select(0, rows)
    logits.index_copy_(0, local, values)
