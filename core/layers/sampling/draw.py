"""One draw a row by inverse CDF in vocabulary order, over the distribution that min_p, top_k and top_p leave.

Filters follow HF and vLLM: temperature first; min_p keeps tokens with at least min_p times the row's largest
probability; top_k keeps the k best of those; top_p keeps the fewest best whose probability, relative to what min_p and
top_k left, reaches top_p. Tokens of equal logits are ordered by id, so each filter keeps an exact set (B03): ties never
survive together by accident.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blockwise import inverse_cdf, row_sum
from .noise import uniform
from .nucleus import keep_nucleus

ALWAYS = 2**62  # a top_k that keeps everything
OFF = 2.0  # a top_p that keeps everything, rounding included

# Candidates looked at before a row is sorted whole. Most rows are settled by the first width (128 microseconds a row
# where a full sort of 49,152 takes 4 ms, measured on Zen 3).
CANDIDATE_WIDTHS = (256, 4096)


def draw(
    logits: Tensor,
    best: Tensor,
    temperature: Tensor,
    min_p: Tensor | None,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    ordered: bool,
) -> Tensor:
    """The op `draw` of contracts/kernels.py."""
    uniforms = uniform(seeds, positions)
    if ordered:
        return draw_ordered(logits, best, temperature, min_p, top_k, top_p, uniforms)
    return draw_unordered(logits, best, temperature, min_p, uniforms)


def draw_unordered(logits: Tensor, best: Tensor, temperature: Tensor, min_p: Tensor | None, uniforms: Tensor) -> Tensor:
    """Rows without top_k and top_p. logits float32 [D, V], best [D] their maxima, uniforms float64 [D] -> int64 [D]."""
    weights = _weights(logits, best, temperature)
    if min_p is not None:
        weights.masked_fill_(weights < min_p.unsqueeze(1), 0.0)
    return inverse_cdf(weights, uniforms)


def draw_ordered(
    logits: Tensor,
    best: Tensor,
    temperature: Tensor,
    min_p: Tensor | None,
    top_k: Tensor,
    top_p: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """Rows with top_k or top_p (ALWAYS and OFF where one is off). Shapes as in `draw_unordered`; top_p float64 [D]."""
    width = logits.shape[1]
    by_mass = top_k == ALWAYS  # top_p alone cuts these rows, relative to all that min_p leaves
    total = torch.full_like(uniforms, float("inf"))
    at = by_mass.nonzero().squeeze(1)
    if at.numel():
        weights = _weights(logits[at], best[at], temperature[at])
        if min_p is not None:
            weights.masked_fill_(weights < min_p[at].unsqueeze(1), 0.0)
        total[at] = row_sum(weights)
    minimum = torch.zeros_like(uniforms) if min_p is None else min_p.to(torch.float64)
    drawn = torch.zeros_like(top_k)
    left = torch.arange(len(drawn), device=logits.device)
    for candidates in (*(c for c in CANDIDATE_WIDTHS if c < width), width):
        columns = [column[left] for column in (best, temperature, minimum, top_k, top_p, total, uniforms)]
        ids, settled = _draw_among(candidates, logits if len(left) == len(drawn) else logits[left], *columns)
        drawn[left] = ids
        left = left[~settled]
        wide = left[by_mass[left]]
        if wide.numel():
            kept = keep_nucleus(logits[wide], best[wide], temperature[wide], top_p[wide] * total[wide])
            drawn[wide] = inverse_cdf(kept, uniforms[wide])
            left = left[~by_mass[left]]
        if not left.numel():
            break
    return drawn


def _weights(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """exp((logits - best) / temperature): float32 [D, V], 1 at the maximum."""
    return torch.sub(logits, best.unsqueeze(1)).div_(temperature.unsqueeze(1)).exp_()


def _candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each row, best first, equal ones by id; where the last value has ties beyond, they are
    arbitrary."""
    if count == logits.shape[1]:
        values, ids = torch.sort(logits, dim=1, descending=True, stable=True)
        return values, ids
    values, ids = logits.topk(count, dim=1)
    if bool((values[:, 1:] == values[:, :-1]).any()):
        ids, by_id = ids.sort(dim=1)
        values, by_value = torch.sort(values.gather(1, by_id), dim=1, descending=True, stable=True)
        ids = ids.gather(1, by_value)
    return values, ids


def _draw_among(
    count: int,
    logits: Tensor,
    best: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    total: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draws among each row's `count` best tokens: (ids int64 [D], settled bool [D]).

    A row is settled when what its filters keep, ties at the edge included, lies within the candidates.
    """
    values, ids = _candidates(logits, count)
    weights = torch.sub(values, best.unsqueeze(1)).div_(temperature.unsqueeze(1)).to(torch.float64).exp_()
    ranks = torch.arange(count, device=logits.device)
    kept = (ranks < top_k.unsqueeze(1)) & (weights >= min_p.unsqueeze(1)) & (weights > 0)
    kept[:, 0] = True
    weights = weights.masked_fill_(~kept, 0.0)
    cumulative = weights.cumsum(1)
    whole = count == logits.shape[1]
    inside = ~kept[:, -1] if not whole else torch.ones_like(kept[:, 0])
    reach = top_p * torch.where(inside, cumulative[:, -1], total)
    kept &= (cumulative - weights) < reach.unsqueeze(1)
    kept[:, 0] = True  # also in a row that is not finite, where every comparison is false
    weights = weights.masked_fill_(~kept, 0.0)
    if whole:
        settled = inside
    else:
        edge = values.gather(1, kept.sum(1, keepdim=True) - 1).squeeze(1)
        known = inside | (top_p == OFF) | (top_k == ALWAYS)
        # A row that is not finite is at fault already: any answer does.
        settled = (known & (values[:, -1] < edge)) | ~torch.isfinite(best)
    by_id = torch.where(kept, ids, logits.shape[1]).sort(dim=1)
    chosen = inverse_cdf_ordered(weights.gather(1, by_id.indices), uniforms)
    return by_id.values.gather(1, chosen.unsqueeze(1)).squeeze(1).clamp_(max=logits.shape[1] - 1), settled


def inverse_cdf_ordered(weights: Tensor, uniforms: Tensor) -> Tensor:
    """As `blockwise.inverse_cdf`, for a few float64 columns [D, K]."""
    cumulative = weights.cumsum(1)
    found = torch.searchsorted(cumulative, uniforms.unsqueeze(1) * cumulative[:, -1:], right=True)
    places = torch.arange(weights.shape[1], device=weights.device)
    return torch.minimum(found, torch.where(weights > 0, places, 0).amax(1, keepdim=True)).squeeze(1)
