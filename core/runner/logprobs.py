"""What the op `gather_logprobs` found, as messages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..contracts.plan import PositionLogprobs


def position_logprobs(ids: Tensor, logprobs: Tensor, ranks: Tensor, counts: Sequence[int]) -> list[PositionLogprobs]:
    """One entry a row, of tensors on the host, each [S, 1 + most]. counts: the alternatives that each row asked for."""
    rows = zip(counts, ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    return [
        PositionLogprobs(its_ids[: 1 + count], values[: 1 + count], its_ranks[: 1 + count])
        for count, its_ids, values, its_ranks in rows
    ]
