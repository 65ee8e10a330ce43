"""Row-wise argmax and inverse-CDF search over the vocabulary in two levels: blocks of tokens, then tokens of one block.

Why not `argmax` and `cumsum`: on a CPU torch's argmax over 49,152 float32 costs about 55 microseconds a row and a
float64 cumsum 65 to 400; one vectorised pass that reduces blocks, and a search among the block results, costs about 10
and 20. Every result depends on its own row only, bit for bit, because a block is always reduced on its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64


def _block_reduce_max(rows: Tensor) -> Tensor:
    """[S, V] with V >= BLOCK -> [S, ceil(V / BLOCK)]; the last block ends at V and may overlap the one before."""
    width = rows.shape[1]
    whole = width // BLOCK
    maxima = rows[:, : whole * BLOCK].view(rows.shape[0], whole, BLOCK).amax(-1)
    if whole * BLOCK == width:
        return maxima
    return torch.cat((maxima, rows[:, width - BLOCK :].amax(-1, keepdim=True)), dim=1)


def row_max(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value and its lowest index: [S, V] -> ([S], int64 [S]). A NaN anywhere in a row makes its value NaN."""
    width = rows.shape[1]
    if width < 2 * BLOCK:
        values, ids = rows.max(dim=1)
        return values, ids
    # The first block that holds the maximum holds its lowest index: an overlap belongs to the earlier block as well.
    block = _block_reduce_max(rows).argmax(1, keepdim=True)
    start = (block * BLOCK).clamp_(max=width - BLOCK)
    values, offset = rows.gather(1, start + torch.arange(BLOCK, device=rows.device)).max(dim=1)
    return values, start.squeeze(1) + offset


def block_sums(weights: Tensor) -> Tensor:
    """float32 [S, V] -> float64 [S, ceil(V / BLOCK)], summed in float64."""
    width = weights.shape[1]
    whole = width // BLOCK
    sums = weights[:, : whole * BLOCK].view(weights.shape[0], whole, BLOCK).sum(-1, dtype=torch.float64)
    if whole * BLOCK == width:
        return sums
    return torch.cat((sums, weights[:, whole * BLOCK :].sum(-1, dtype=torch.float64, keepdim=True)), dim=1)


def row_sum(weights: Tensor) -> Tensor:
    """float32 [S, V] -> float64 [S]; the order of addition is fixed, whatever the number of rows."""
    return block_sums(weights).cumsum(1)[:, -1]


def _first_above(cumulative: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds target [S, 1], else (rounding) the last one with weight: int64
    [S, 1]."""
    found = torch.searchsorted(cumulative, target, right=True)
    # cumulative is flat where weights are zero, so `found` itself always has weight when it is inside.
    places = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(1, keepdim=True)
    return torch.minimum(found, last)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws one index a row with probability proportional to its weight.

    weights: float32 [S, V], not negative, at least one positive a row. uniforms: float64 [S] in [0, 1). Returns int64
    [S]: the first index, in vocabulary order, whose cumulative weight exceeds uniform * total. Never one of weight
    zero.
    """
    width = weights.shape[1]
    sums = block_sums(weights)
    cumulative = sums.cumsum(1)
    target = uniforms.unsqueeze(1) * cumulative[:, -1:]
    block = _first_above(cumulative, sums, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    ids = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inner = weights.gather(1, ids.clamp(max=width - 1)).to(torch.float64).masked_fill_(ids >= width, 0.0)
    return (block * BLOCK + _first_above(inner.cumsum(1), inner, target - before)).squeeze(1)
