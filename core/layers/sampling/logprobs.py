"""The op `gather_logprobs`: log-probabilities of a chosen token, its rank, and the best alternatives.

A rank is 1 + the number of tokens with a strictly greater logit; alternatives are listed best first, equal ones by id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blockwise import row_sum

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say (B05)


def _log_normalizer(logits: Tensor) -> Tensor:
    """log(sum(exp(row))) of float32 [S, V]: float64 [S], the same whatever the number of rows."""
    best = logits.amax(1, keepdim=True)
    return best.squeeze(1).to(torch.float64) + row_sum((logits - best).exp_()).log()


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, ids) of the `count` largest logits of each row, best first, equal ones by id."""
    if count >= logits.shape[1]:
        values, ids = torch.sort(logits, dim=1, descending=True, stable=True)
        return values, ids
    values, ids = logits.topk(count + 1, dim=1)
    # A value that goes on beyond the list may have left out a lower id: choose among all of its tokens again.
    ties = (values[:, count] == values[:, count - 1]).nonzero().squeeze(1).tolist()
    ids, by_id = ids[:, :count].sort(dim=1)
    values, by_value = torch.sort(values[:, :count].gather(1, by_id), dim=1, descending=True, stable=True)
    ids = ids.gather(1, by_value)
    for row in ties:
        first_tie = int((values[row] > values[row, -1]).sum())
        ids[row, first_tie:] = (logits[row] == values[row, -1]).nonzero().squeeze(1)[: count - first_tie]
    return values, ids


def gather_logprobs(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int64, log-probabilities float64, ranks int64), each [S, 1 + count]: the chosen token first, then the `count`
    best (at most V). logits: float32 [S, V]; chosen: int64 [S], within the vocabulary.

    Rows of NaN give FLOOR; their requests end with an error of their own.
    """
    normalizer = _log_normalizer(logits).unsqueeze(1)
    chosen_logits = logits.gather(1, chosen.unsqueeze(1))
    most = min(count, logits.shape[1])
    values, ids = chosen_logits, chosen.unsqueeze(1)
    if most:
        best_values, best_ids = _best(logits, most)
        values, ids = torch.cat((values, best_values), 1), torch.cat((ids, best_ids), 1)
    ranks = torch.ones_like(ids)
    ranks[:, 0] += (logits > chosen_logits).sum(1)
    if most:
        # The alternatives are sorted, so those strictly greater than one are all listed before it.
        ranks[:, 1:] += torch.searchsorted(-best_values, -best_values, right=False)
    logprobs = (values.to(torch.float64) - normalizer).nan_to_num_(FLOOR, FLOOR, FLOOR).clamp_(min=FLOOR)
    return ids, logprobs, ranks
