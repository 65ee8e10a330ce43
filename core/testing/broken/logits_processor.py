"""Logits processors with one fault each. All but the fault is one rule: tokens that were used get one less."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from ...contracts.logits_processor import BatchUpdate, LogitsProcessor, LogitsProcessorProvider, LogitsRows
from . import BrokenSample


def _penalise(logits: Tensor, rows: LogitsRows, reach: int = 0, amount: float = 1.0) -> None:
    """reach: tokens beyond the position that count, too: none, when it is right."""
    history = rows.token_ids.index_select(0, rows.slots).long()
    inside = torch.arange(history.shape[1]) < rows.positions.unsqueeze(1) + reach
    amounts = inside * amount
    places = history.clamp(0, logits.shape[1] - 1)
    logits -= torch.zeros_like(logits).scatter_reduce_(1, places, amounts, "amax")


class ReadsBeyondThePosition(LogitsProcessor):
    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        _penalise(logits, rows, reach=1)


class EditsTheWholeBatch(LogitsProcessor):
    """What one request has used costs all of them."""

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        change = torch.zeros_like(logits)
        _penalise(change, rows)
        logits += change.amin(0, keepdim=True)


class DependsOnTheBatch(LogitsProcessor):
    """Normalises by the largest logit of the batch."""

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        logits -= logits.max()


class LeaksBetweenRequests(LogitsProcessor):
    """Counts the steps of a slot, and goes on counting when another request gets it."""

    def __init__(self) -> None:
        self._steps: Counter[int] = Counter()

    def update_batch(self, update: BatchUpdate) -> None:
        self._slots = {**getattr(self, "_slots", {}), **{added.request_id: added.slot for added in update.added}}

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        for row, request_id in enumerate(rows.request_ids):
            self._steps[self._slots[request_id]] += 1
            logits[row, 0] -= self._steps[self._slots[request_id]]


class ForgetsAtPreemption(LogitsProcessor):
    """Counts what was generated, and begins anew when the request comes back."""

    def __init__(self) -> None:
        self._steps: Counter[int] = Counter()

    def update_batch(self, update: BatchUpdate) -> None:
        for request_id in update.removed:
            del self._steps[request_id]

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        for row, request_id in enumerate(rows.request_ids):
            if rows.draft_offsets[row] == 0:
                self._steps[request_id] += 1
            logits[row, 0] -= self._steps[request_id] + rows.draft_offsets[row]


class TakesDraftsForTokens(LogitsProcessor):
    """Counts rows, although a draft may be rejected and is then asked for again."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}

    def update_batch(self, update: BatchUpdate) -> None:
        self._tokens.update({added.request_id: len(added.token_ids) for added in update.added})

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        for row, request_id in enumerate(rows.request_ids):
            self._tokens[request_id] += 1
            logits[row, 0] -= self._tokens[request_id]


class ForgetsMoves(LogitsProcessor):
    """Knows requests by the slot that they got first."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}

    def update_batch(self, update: BatchUpdate) -> None:
        self._prompts.update({added.slot: added.num_prompt_tokens for added in update.added})

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        amounts = torch.tensor([self._prompts.get(slot, 0) for slot in rows.slots.tolist()])
        logits[:, 0] -= amounts


class MakesNan(LogitsProcessor):
    """Scales so that what is forbidden becomes 0 * inf."""

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        logits *= torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1.0)


class WaitsForTheDevice(LogitsProcessor):
    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        for row in range(len(rows.request_ids)):
            logits[row, 0] -= int(rows.positions[row].item())


class WritesToItsHistory(LogitsProcessor):
    """Uses the engine's tokens as scratch space."""

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        _penalise(logits, rows)
        rows.token_ids.clamp_(min=1)


class EditsACopy(LogitsProcessor):
    """An expression that gives a new tensor, where one that edits in place is wanted."""

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        logits = logits - 1.0


class TakesTheFirstArguments(LogitsProcessor):
    """What the first row's request says holds for all."""

    def __init__(self) -> None:
        self._amounts: dict[int, float] = {}

    def update_batch(self, update: BatchUpdate) -> None:
        for request_id in update.removed:
            del self._amounts[request_id]
        self._amounts.update({added.request_id: added.arguments["amount"] for added in update.added})

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        _penalise(logits, rows, amount=self._amounts[rows.request_ids[0]])


class ForgetsNobody(LogitsProcessor):
    """Remembers what every request said, for ever."""

    def __init__(self) -> None:
        self._arguments: dict[int, Any] = {}

    def update_batch(self, update: BatchUpdate) -> None:
        self._arguments.update({added.request_id: added.arguments for added in update.added})

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        _penalise(logits, rows)


class Amount(BaseModel):
    amount: float = Field(1.0, gt=0, description="What a used token costs.")


def _sample(
    name: str, processor: type[LogitsProcessor], caught_by: str, arguments: type[BaseModel] | None = None
) -> BrokenSample:
    provider = LogitsProcessorProvider(
        name=name, build=lambda context: processor(), arguments=arguments, summary=f"broken: {name}"
    )
    return BrokenSample(name, provider, caught_by)


BROKEN: tuple[BrokenSample, ...] = (
    _sample("reads_beyond_the_position", ReadsBeyondThePosition, "tokens_beyond_the_position_are_not_read"),
    _sample("edits_the_whole_batch", EditsTheWholeBatch, "a_row_does_not_depend_on_the_others"),
    _sample("depends_on_the_batch", DependsOnTheBatch, "a_row_does_not_depend_on_the_others"),
    _sample("leaks_between_requests", LeaksBetweenRequests, "a_used_slot_keeps_nothing"),
    _sample("forgets_at_preemption", ForgetsAtPreemption, "coming_back_after_preemption_changes_nothing"),
    _sample("takes_drafts_for_tokens", TakesDraftsForTokens, "drafts_are_seen_as_tokens"),
    _sample("forgets_moves", ForgetsMoves, "batches_may_change_in_any_way"),
    _sample("makes_nan", MakesNan, "it_makes_no_nan"),
    _sample("waits_for_the_device", WaitsForTheDevice, "it_does_not_wait_for_the_device"),
    _sample("edits_a_copy", EditsACopy, "it_changes_something"),
    _sample("takes_the_first_arguments", TakesTheFirstArguments, "a_row_does_not_depend_on_the_others", Amount),
    _sample("forgets_nobody", ForgetsNobody, "forgets_requests_that_ended"),
    _sample("writes_to_its_history", WritesToItsHistory, "rows_are_edited_in_place"),
)
