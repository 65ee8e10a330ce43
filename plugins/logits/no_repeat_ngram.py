"""Logits processor `no_repeat_ngram`: no sequence of `size` tokens comes twice in one request, its prompt included.

The definition is Hugging Face's no_repeat_ngram_size: a token is banned when it would complete a sequence of `size` tokens
that the request's tokens hold already. Size 1 bans every token that was there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessorContext,
    LogitsProcessorProvider,
    LogitsRows,
)

if TYPE_CHECKING:
    from torch import Tensor

MAX_SIZE = 256  # each step compares `size` tokens with every place of the history


class NoRepeatNgramArguments(BaseModel):
    """What a request says."""

    model_config = ConfigDict(extra="forbid", strict=True)

    size: int = Field(ge=1, le=MAX_SIZE, description="Tokens in a sequence that must not come twice.")


class NoRepeatNgram(LogitsProcessor):
    """Keeps, for each request, its size and an upper bound of its length: the device's counts are not read back."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._longest: dict[int, int] = {}  # request -> the most tokens that its history can have by now

    def update_batch(self, update: BatchUpdate) -> None:
        for request_id in update.removed:
            self._sizes.pop(request_id, None)
            self._longest.pop(request_id, None)
        for added in update.added:
            self._sizes[added.request_id] = int(added.arguments["size"])
            self._longest[added.request_id] = len(added.token_ids)

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        import torch

        places: dict[int, list[int]] = {}
        for place, request_id in enumerate(rows.request_ids):
            places.setdefault(self._sizes[request_id], []).append(place)
        for size, group in places.items():
            length = max(self._longest[rows.request_ids[place]] + rows.draft_offsets[place] for place in group)
            if length < size:
                continue
            if len(group) == len(rows.request_ids):
                ban_repeats(logits, rows.token_ids[:, :length].index_select(0, rows.slots), rows.positions, size)
                continue
            at = torch.tensor(group, dtype=torch.int64, device=logits.device)
            part = logits.index_select(0, at)
            history = rows.token_ids[:, :length].index_select(0, rows.slots.index_select(0, at))
            ban_repeats(part, history, rows.positions.index_select(0, at), size)
            logits.index_copy_(0, at, part)
        for request_id in rows.request_ids:  # at most one token more for each of its rows
            self._longest[request_id] += 1


def ban_repeats(logits: Tensor, history: Tensor, positions: Tensor, size: int) -> None:
    """Edits logits float32 [G, V] in place. history: integers [G, L], row i's tokens up to positions[i] (int64 [G]); what is
    beyond may be anything. L >= size."""
    import torch

    num_windows = history.shape[1] - size + 1
    # Window w is tokens w .. w + size - 1 and lies in the history when its last one does.
    last = torch.arange(size - 1, size - 1 + num_windows, device=logits.device)
    same = last < positions.unsqueeze(1)
    begin = positions - (size - 1)  # of the tokens that the next one would follow
    for offset in range(size - 1):
        current = history.gather(1, (begin + offset).clamp_(min=0, max=history.shape[1] - 1).unsqueeze(1))
        same = same & (history[:, offset : offset + num_windows] == current)
    banned = torch.where(same, history[:, size - 1 :], 0).to(torch.int64)
    # Added, so that one token may be banned twice; minus zero changes no bit of a token that is not banned.
    change = torch.full(same.shape, -0.0, dtype=logits.dtype, device=logits.device).masked_fill_(same, float("-inf"))
    logits.scatter_add_(1, banned, change)


@hookimpl
def hotswap_logits_processor() -> Iterator[LogitsProcessorProvider]:
    def build(context: LogitsProcessorContext) -> LogitsProcessor:
        return NoRepeatNgram()

    yield LogitsProcessorProvider(
        name="no_repeat_ngram",
        build=build,
        arguments=NoRepeatNgramArguments,
        summary="no sequence of `size` tokens comes twice; for requests that ask for it",
    )
