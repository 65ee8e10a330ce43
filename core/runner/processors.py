"""Runs the operator's logits processors: keeps each told of the requests that it serves, and contains what it raises.

A processor never works on the runner's own logits but on a copy of its rows, so one that raises half-way leaves nothing
behind. It is then asked again for each row alone, and only the requests whose row it cannot process end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..contracts.logits_processor import AddedRequest, BatchUpdate, LogitsProcessor, LogitsRows
from ..contracts.plan import NewRequest
from .transfer import Transfers

logger = logging.getLogger("hotswap.runner")


@dataclass(frozen=True, slots=True)
class ActiveProcessor:
    """described: for messages. serves_all: False: only the requests whose sampling names it."""

    name: str
    described: str
    processor: LogitsProcessor
    serves_all: bool


@dataclass(frozen=True, slots=True)
class ProcessedRows:
    """The rows of a step that one processor works on; kept while the same requests sample.

    rows: int64, their places among the S sampling rows. at: int64, their places among the E edited rows; None: all of them,
        in that order. slots, num_prompt_tokens: int64.
    """

    processor: int
    request_ids: tuple[int, ...]
    rows: Tensor
    at: Tensor | None
    slots: Tensor
    num_prompt_tokens: Tensor


@dataclass(slots=True)
class _Changes:
    added: list[AddedRequest] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)


class ProcessorChain:
    """All active processors, in the operator's order. One thread: the worker's."""

    def __init__(self, active: Sequence[ActiveProcessor] = (), transfers: Transfers | None = None) -> None:
        """transfers: to the device that logits lie on; the host when not given."""
        self._active = tuple(active)
        self._transfers = transfers or Transfers()
        self._changes = [_Changes() for _ in self._active]
        self._served: dict[int, tuple[int, ...]] = {}  # request -> processors that serve it
        self._changed = False
        self._logged: set[tuple[int, str]] = set()
        self.failures: dict[int, str] = {}  # requests in the batch that end because of a processor, and why

    def __bool__(self) -> bool:
        return bool(self._active)

    def add(self, new: NewRequest, slot: int) -> tuple[int, ...]:
        """The numbers of the processors that serve a request, which are told of it with the next `flush`."""
        asked = new.sampling.logits_processors
        serving = tuple(i for i, found in enumerate(self._active) if found.serves_all or found.name in asked)
        for i in serving:
            self._changes[i].added.append(
                AddedRequest(
                    new.request_id,
                    slot,
                    new.token_ids,
                    new.num_prompt_tokens,
                    new.sampling,
                    asked.get(self._active[i].name, {}),
                )
            )
        if serving:
            self._served[new.request_id] = serving
            self._changed = True
        return serving

    def remove(self, request_id: int) -> None:
        self.failures.pop(request_id, None)
        for i in self._served.pop(request_id, ()):
            self._changes[i].removed.append(request_id)
            self._changed = True

    def clear(self) -> None:
        """Every request leaves."""
        for request_id in list(self._served):
            self.remove(request_id)
        self.flush()

    def flush(self) -> None:
        """Tells the processors what changed. A request that one of them cannot take ends (`failures`), and that one hears
        no more of it."""
        if not self._changed:
            return
        self._changed = False
        for i, changes in enumerate(self._changes):
            if not changes.added and not changes.removed:
                continue
            self._changes[i] = _Changes()
            if changes.removed:
                self._tell(i, BatchUpdate(removed=tuple(changes.removed)))
            # One call for each: what it raises is then about that request.
            for added in changes.added:
                error = self._tell(i, BatchUpdate(added=(added,)))
                if error is not None:
                    self._fail(added.request_id, i, error)
                    self._served[added.request_id] = tuple(n for n in self._served[added.request_id] if n != i)

    def group(
        self, request_ids: Sequence[int], edited: Sequence[int], slots: Tensor, num_prompt_tokens: Tensor
    ) -> tuple[ProcessedRows, ...]:
        """The rows of each processor. request_ids, slots, num_prompt_tokens: of the S sampling rows; edited: the places
        of the E edited ones among them."""
        found: dict[int, list[int]] = {}
        for at, place in enumerate(edited):
            if request_ids[place] not in self.failures:
                for number in self._served.get(request_ids[place], ()):
                    found.setdefault(number, []).append(at)
        groups = []
        for number, at_rows in sorted(found.items()):
            places = [edited[at] for at in at_rows]
            rows = self._transfers.upload(places, torch.int64)
            groups.append(
                ProcessedRows(
                    number,
                    tuple(request_ids[place] for place in places),
                    rows,
                    None if len(at_rows) == len(edited) else self._transfers.upload(at_rows, torch.int64),
                    slots.index_select(0, rows),
                    num_prompt_tokens.index_select(0, rows),
                )
            )
        return tuple(groups)

    def apply(self, logits: Tensor, groups: Sequence[ProcessedRows], token_ids: Tensor, positions: Tensor) -> Tensor:
        """What the processors make of the edited rows, float32 [E, V]: `logits` itself is edited or left behind.

        positions: int64, of all S sampling rows. Requests whose row a processor raised on are in `failures` afterwards.
        """
        for group in groups:
            rows = LogitsRows(
                group.request_ids,
                (0,) * len(group.request_ids),
                token_ids,
                group.slots,
                positions.index_select(0, group.rows),
                group.num_prompt_tokens,
            )
            if group.at is None:
                logits = self._process(group.processor, logits, rows)
            else:  # no name for either copy: one that lasts until the next processor's are made would be one too many
                logits.index_copy_(0, group.at, self._process(group.processor, logits.index_select(0, group.at), rows))
        return logits

    def names(self, request_id: int) -> str:
        """The processors that serve a request, for messages."""
        return " or ".join(self._active[i].described for i in self._served.get(request_id, ()))

    def _process(self, number: int, given: Tensor, rows: LogitsRows) -> Tensor:
        processor = self._active[number].processor
        work = given.clone()
        if self._guarded(number, "apply", lambda: processor.apply(work, rows)) is None:
            return work
        parts = []
        for place, request_id in enumerate(rows.request_ids):
            part = given[place : place + 1].clone()
            row = _one_row(rows, place)
            error = self._guarded(number, "apply", lambda part=part, row=row: processor.apply(part, row))  # type: ignore[misc]
            if error is not None:
                self._fail(request_id, number, error)
                part = given[place : place + 1]
            parts.append(part)
        return torch.cat(parts)

    def _tell(self, number: int, update: BatchUpdate) -> Exception | None:
        processor = self._active[number].processor
        return self._guarded(number, "update_batch", lambda: processor.update_batch(update))

    def _guarded(self, number: int, what: str, call: Callable[[], None]) -> Exception | None:
        """Calls a plugin; what it raised. The log has the first traceback of each kind of call."""
        try:
            call()
        except Exception as error:  # a plugin may raise anything; the fault is its requests', not the engine's
            if (number, what) not in self._logged:
                self._logged.add((number, what))
                logger.warning("%s: %s() raised", self._active[number].described, what, exc_info=True)
            return error
        return None

    def _fail(self, request_id: int, number: int, error: Exception) -> None:
        """The client is told who failed. What was said then can hold anything, other requests' data too: that is for the
        log."""
        described = self._active[number].described
        logger.warning("request %d ends: %s: %s: %s", request_id, described, type(error).__name__, error)
        self.failures.setdefault(request_id, f"{described} failed on this request; the engine's log says why")


def _one_row(rows: LogitsRows, place: int) -> LogitsRows:
    at = slice(place, place + 1)
    return LogitsRows(
        rows.request_ids[at],
        rows.draft_offsets[at],
        rows.token_ids,
        rows.slots[at],
        rows.positions[at],
        rows.num_prompt_tokens[at],
    )
