"""Kind `policy`: the order in which waiting requests are served, and each running request's share of a step.

Called from the engine's scheduling thread only (and from the simulator's loop), between steps; never while a step is being
built by another thread. Views are read-only and live: keep ids, not copied fields, across calls.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from .provider import BuildContext, Provider


class RequestView(Protocol):
    """Read-only facts about a request. All counts are tokens; times are seconds on the engine's clock."""

    @property
    def request_id(self) -> int: ...
    @property
    def priority(self) -> int:
        """The request's class: a lower value is served earlier. 0 unless the client says otherwise, and always under a
        policy that does not use priorities."""
        ...

    @property
    def user(self) -> str: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int:
        """Confirmed output tokens."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Confirmed tokens whose KV is in the cache."""
        ...

    @property
    def num_scheduled_tokens(self) -> int:
        """Computed tokens and those in flight: an upper bound."""
        ...

    @property
    def num_in_flight_steps(self) -> int: ...
    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens that a prefix hit saved, or while waiting a hint of how many it would."""
        ...

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def max_tokens(self) -> int:
        """The most output tokens that this request may still produce in all."""
        ...

    @property
    def draft_acceptance(self) -> float:
        """Share of draft tokens accepted so far, 0 to 1; 0 without speculation."""
        ...


@dataclass(slots=True)
class Budget:
    """What is left of a step while it is being planned. Owned by the plan builder; policies only read it.

    num_tokens: tokens. num_requests: seats in the batch that a waiting request could take.
    """

    num_tokens: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Shed:
    """A waiting request that the policy gives up on: why, and the HTTP status that says so (429 or 503)."""

    request_id: int
    reason: str
    status: int = 429


class Policy(ABC):
    """Owns the queue of waiting requests. The core allocates, frees and preempts; a policy only orders and shares.

    An operator may swap policies while serving, between two steps. The waiting requests are then pushed into the new one in
    order of arrival; those that run stay, so `on_scheduled`, `on_tokens` and `on_finish` also come for requests that were
    never pushed here, and `push` for one that was preempted and has run under another policy.

    uses_priority: whether `RequestView.priority` means anything to it. False: a client that asks for a priority gets a 400,
        and every request's is 0.
    """

    uses_priority: ClassVar[bool] = False

    @abstractmethod
    def push(self, view: RequestView) -> None:
        """Adds a waiting request: new, returned by preemption (then `view.num_preemptions` > 0), or back after it was popped
        and set aside until another one had computed a prefix that they share; `on_scheduled` never came for it then."""

    @abstractmethod
    def peek(self) -> RequestView | None:
        """The request to admit next, without taking it; None when nobody waits."""

    @abstractmethod
    def pop(self) -> RequestView:
        """Takes what `peek` shows. Raises IndexError when nobody waits."""

    @abstractmethod
    def remove(self, request_id: int) -> None:
        """Forgets a waiting request (aborted). Raises KeyError when it does not wait here."""

    @abstractmethod
    def __len__(self) -> int:
        """How many requests wait."""

    @abstractmethod
    def waiting(self) -> Sequence[RequestView]:
        """Every waiting request in any order; for a swap of policies and for introspection, never called per step."""

    def share(self, view: RequestView, budget: Budget) -> int:
        """The most tokens that this request may have in the step being planned; the core never grants more than is left."""
        return budget.num_tokens

    def shed(self) -> Iterable[Shed]:
        """Waiting requests to refuse now. Called once a step, before admission. The scheduler then takes each
        out with `remove` and refuses it."""
        return ()

    def hints_wanted(self) -> Iterable[RequestView]:
        """Waiting requests whose `num_cached_prompt_tokens` is to be looked up now. Called when a step is begun, before `shed`;
        the views have their new values when it is done. At most 32 are looked up a step, and whoever was preempted keeps what
        its first admission saved. Without being asked for, a hint is as of the request's arrival, or of its return from
        waiting for a prefix."""
        return ()

    def on_scheduled(self, view: RequestView, num_tokens: int) -> None:
        """`num_tokens` of this request were put into the step."""

    def on_tokens(self, view: RequestView, num_tokens: int) -> None:
        """`num_tokens` output tokens were confirmed."""

    def on_finish(self, view: RequestView) -> None:
        """The request ended, for whatever reason, and will not be seen again."""


_REMOVED_ENTRIES_KEPT = 64


class KeyedPolicy(Policy):
    """A whole policy from one `key`: waiting requests are served in ascending order of it, over a heap.

    The key is taken when a request is pushed. Removal is lazy: a removed entry stays in the heap until it surfaces, or
    until the removed ones are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int]] = []
        self._views: dict[int, RequestView] = {}

    @abstractmethod
    def key(self, view: RequestView) -> Any:
        """A sortable key; ties are broken by request id, which grows with arrival."""

    def push(self, view: RequestView) -> None:
        self._views[view.request_id] = view
        heapq.heappush(self._heap, (self.key(view), view.request_id))

    def peek(self) -> RequestView | None:
        while self._heap:
            view = self._views.get(self._heap[0][1])
            if view is not None:
                return view
            heapq.heappop(self._heap)
        return None

    def pop(self) -> RequestView:
        view = self.peek()
        if view is None:
            raise IndexError("pop from a policy with no waiting request")
        heapq.heappop(self._heap)
        del self._views[view.request_id]
        return view

    def remove(self, request_id: int) -> None:
        del self._views[request_id]
        if len(self._heap) > 2 * len(self._views) + _REMOVED_ENTRIES_KEPT:
            self._heap = [entry for entry in self._heap if entry[1] in self._views]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._views)

    def waiting(self) -> Sequence[RequestView]:
        return list(self._views.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyProvider(Provider[Policy]):
    """default_victim: the victim rule used when the operator names none."""

    default_victim: str = "newest"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext(BuildContext):
    """A policy needs nothing beyond the common context."""
