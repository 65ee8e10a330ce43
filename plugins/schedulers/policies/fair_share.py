"""Policy `fair_share`: the user that has had the least service is served next.

The Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, arXiv 2401.00588: a counter
of weighted tokens for each user; whoever of those with waiting requests has the smallest goes first; a user that comes back is
lifted to the smallest counter among those that wait, or, when nobody waits, to that of the user that left the queue last, so
that idling saves no credit. The order is work-conserving: nobody is held back while there is room.

The bound, after the paper's Theorem 4.4. Let a batch have S seats, prompts at most L_in tokens and answers at most L_out. Take
two users that both have waiting requests throughout an interval. Since the one ahead was last served, when its counter was the
smallest, it can have been charged only for what it had running by then: the rest of the one prompt that is being computed in
chunks, and the answers of at most S requests. So counters of users that wait are never further apart than
    U = input_weight * L_in + output_weight * S * L_out,
and the weighted service that the two get in the interval differs by at most 2 U. With M = S * (L_in + L_out), the most tokens
in a batch, and input_weight <= output_weight, this U is at most the paper's, max(input_weight * L_in, output_weight * M). (The
paper reserves memory for whole answers, so there M is what the cache holds. Here nothing is reserved.)

What differs from the paper:
- a prompt is charged chunk by chunk, as it is put into steps, not as a whole at admission;
- prompt tokens that the prefix cache saved are not charged: nothing was computed for them;
- nothing is charged twice. What preemption makes the engine compute again was the engine's choice, so a prompt token is charged
  the first time it is scheduled, an output token when it is confirmed;
- a user that has nothing waiting or running, and is not ahead of where it would start anew, is forgotten: it would be lifted to
  the same counter anyway.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.policy import Policy, PolicyContext, PolicyProvider, RequestView

from .keyed_queue import KeyedQueue

MAX_IDLE_USERS = 4096  # a user's name is the client's to choose: of more, those that are the least ahead are forgotten
_OUTDATED_KEPT = 64

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class FairShareOptions(BaseModel):
    """What may follow `--plugin policy=fair_share,`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input_weight: Weight = Field(default=1.0, description="What a prompt token costs that is computed.")
    output_weight: Weight = Field(default=2.0, description="What an output token costs.")
    weights: dict[str, Weight] = Field(
        default_factory=dict,
        description="Users that are owed another share than 1: one of weight 2 gets twice as much as one of weight 1.",
    )


@dataclass(slots=True, eq=False)
class _User:
    """number: by first appearance. counter: service over weight. last_served: a number that grows with every request served.

    num_live: requests that wait, run, or are set aside. in_heap: whether the heap of waiting users has an entry of it, which
    may be outdated.
    """

    name: str
    number: int
    weight: float
    counter: float
    last_served: int = -1
    num_live: int = 0
    in_heap: bool = False
    waiting: KeyedQueue[tuple[float]] = field(default_factory=KeyedQueue)

    def rank(self) -> tuple[float, int, int]:
        """Who goes first; between equals, whoever was served less recently. Grows only."""
        return self.counter, self.last_served, self.number


@dataclass(slots=True)
class _Live:
    """num_charged: prompt tokens from the first on that are paid for, or need not be."""

    user: _User
    num_charged: int


class FairShare(Policy):
    """By user, smallest counter first; within a user by arrival. Calls are O(log users + log requests of the user) on average,
    callbacks O(1).

    The heap of users has one entry for each that waits. Ranks only grow, so an outdated entry is too early and is put right
    when it surfaces.
    """

    def __init__(self, options: FairShareOptions) -> None:
        self._options = options
        self._users: dict[str, _User] = {}
        self._live: dict[int, _Live] = {}
        self._heap: list[tuple[tuple[float, int, int], _User]] = []
        self._idle: list[tuple[float, str]] = []  # users without a request; some entries are outdated
        self._last_to_leave: _User | None = None
        self._num_users_waiting = 0
        self._num_users_seen = 0
        self._num_waiting = 0
        self._num_served = 0

    def counter(self, user: str) -> float:
        """Weighted service of a user over its weight; where one that is not known would start."""
        known = self._users.get(user)
        return self._level() if known is None else known.counter

    def push(self, view: RequestView) -> None:
        user = self._meet(view).user
        if not user.waiting:
            user.counter = max(user.counter, self._level())
            self._num_users_waiting += 1
            if not user.in_heap:
                user.in_heap = True
                heapq.heappush(self._heap, (user.rank(), user))
        user.waiting.put(view, (view.arrival_time,))
        self._num_waiting += 1

    def peek(self) -> RequestView | None:
        user = self._first()
        return None if user is None else user.waiting.first()

    def pop(self) -> RequestView:
        user = self._first()
        view = None if user is None else user.waiting.first()
        if user is None or view is None:
            raise IndexError("pop from a policy with no waiting request")
        self._take(user, view.request_id)
        user.last_served = self._num_served
        self._num_served += 1
        return view

    def remove(self, request_id: int) -> None:
        self._take(self._live[request_id].user, request_id)

    def __len__(self) -> int:
        return self._num_waiting

    def waiting(self) -> Sequence[RequestView]:
        return [view for user in self._users.values() for view in user.waiting.slice(0, len(user.waiting))]

    def on_scheduled(self, view: RequestView, num_tokens: int) -> None:
        end = view.num_scheduled_tokens
        start, num_prompt_tokens = end - num_tokens, view.num_prompt_tokens
        if start >= num_prompt_tokens:
            return
        live = self._meet(view)
        start, end = max(start, live.num_charged), min(end, num_prompt_tokens)
        if end > start:
            live.num_charged = end
            live.user.counter += self._options.input_weight * (end - start) / live.user.weight

    def on_tokens(self, view: RequestView, num_tokens: int) -> None:
        user = self._meet(view).user
        user.counter += self._options.output_weight * num_tokens / user.weight

    def on_finish(self, view: RequestView) -> None:
        live = self._live.pop(view.request_id, None)
        if live is not None:
            live.user.num_live -= 1
            if not live.user.num_live:
                heapq.heappush(self._idle, (live.user.counter, live.user.name))
                self._forget_users()

    def _meet(self, view: RequestView) -> _Live:
        """What is known of a request. One that is not was another policy's before a swap, if it is not new; what it has
        produced says that its prompt is paid for.
        """
        live = self._live.get(view.request_id)
        if live is None:
            name = view.user
            user = self._users.get(name)
            if user is None:
                weight = self._options.weights.get(name, 1.0)
                user = self._users[name] = _User(name, self._num_users_seen, weight, self._level())
                self._num_users_seen += 1
            user.num_live += 1
            num_charged = view.num_prompt_tokens if view.num_output_tokens else 0
            live = self._live[view.request_id] = _Live(user, num_charged)
        return live

    def _take(self, user: _User, request_id: int) -> None:
        """Out of the queue. Raises KeyError when the request does not wait."""
        user.waiting.remove(request_id)
        self._num_waiting -= 1
        if not user.waiting:
            self._num_users_waiting -= 1
            self._last_to_leave = user
            if len(self._heap) > 2 * self._num_users_waiting + _OUTDATED_KEPT:
                self._sweep()

    def _first(self) -> _User | None:
        """The waiting user that is served next."""
        heap = self._heap
        while heap:
            rank, user = heap[0]
            if not user.waiting:
                user.in_heap = False
                heapq.heappop(heap)
            elif rank != user.rank():
                heapq.heapreplace(heap, (user.rank(), user))
            else:
                return user
        return None

    def _level(self) -> float:
        """The counter that one who comes back is lifted to. It never falls."""
        user = self._first() or self._last_to_leave
        return 0.0 if user is None else user.counter

    def _sweep(self) -> None:
        """Entries of users that do not wait are dropped, once they are the majority."""
        for _, user in self._heap:
            user.in_heap = bool(user.waiting)
        self._heap = [(user.rank(), user) for _, user in self._heap if user.waiting]
        heapq.heapify(self._heap)

    def _forget_users(self) -> None:
        level = self._level()
        while self._idle and (self._idle[0][0] <= level or len(self._idle) > MAX_IDLE_USERS):
            counter, name = heapq.heappop(self._idle)
            user = self._users.get(name)
            if user is not None and not user.num_live and user.counter == counter:
                del self._users[name]


@hookimpl
def hotswap_policy() -> Iterator[PolicyProvider]:
    def build(context: PolicyContext) -> FairShare:
        options = context.options if isinstance(context.options, FairShareOptions) else FairShareOptions()
        return FairShare(options)

    yield PolicyProvider(
        name="fair_share",
        build=build,
        options=FairShareOptions,
        summary="the user that has had the least service first, by a counter of weighted tokens",
    )
