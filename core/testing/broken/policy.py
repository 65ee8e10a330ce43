"""Policies with one fault each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ...contracts.policy import Budget, KeyedPolicy, Policy, PolicyProvider, RequestView, Shed
from ..plain import ByArrival
from . import BrokenSample


class Loses(ByArrival):
    """Loses every fifth request that is pushed."""

    def __init__(self) -> None:
        super().__init__()
        self._num_pushed = 0

    def push(self, view: RequestView) -> None:
        self._num_pushed += 1
        if self._num_pushed % 5:
            super().push(view)


class KeepsWhatItGave(ByArrival):
    """Keeps every third request that it has given away."""

    def pop(self) -> RequestView:
        view = super().pop()
        if view.request_id % 3 == 2:
            self.push(view)
        return view


class NewestFirst(KeyedPolicy):
    """Serves the latest arrival: under load the oldest waits for ever."""

    def key(self, view: RequestView) -> float:
        return -view.arrival_time


class PeekRotates(ByArrival):
    """Shows another one each time it is asked."""

    def peek(self) -> RequestView | None:
        if not len(self):
            return None
        view = super().pop()
        self.push(view)
        self._heap.sort(key=lambda entry: entry[0], reverse=True)
        return super().peek()


class RemovesInSilence(ByArrival):
    """`remove` of an unknown request says nothing."""

    def remove(self, request_id: int) -> None:
        if request_id in self._views:
            super().remove(request_id)


class CountsTheRunning(ByArrival):
    """Keeps a table of its requests, and fails on one that it never saw: as after a swap."""

    def __init__(self) -> None:
        super().__init__()
        self._num_tokens: dict[int, int] = {}

    def push(self, view: RequestView) -> None:
        self._num_tokens.setdefault(view.request_id, 0)
        super().push(view)

    def on_tokens(self, view: RequestView, num_tokens: int) -> None:
        self._num_tokens[view.request_id] += num_tokens

    def on_finish(self, view: RequestView) -> None:
        self._num_tokens.pop(view.request_id, None)


class KeepsViews(ByArrival):
    """A history that nobody ends."""

    def __init__(self) -> None:
        super().__init__()
        self._history: list[RequestView] = []

    def on_finish(self, view: RequestView) -> None:
        self._history.append(view)


class SpendsTheBudget(ByArrival):
    """Takes its share out of the budget itself."""

    def share(self, view: RequestView, budget: Budget) -> int:
        granted = budget.num_tokens // 2
        budget.num_tokens -= granted
        return granted


class ShedsStrangers(ByArrival):
    """Refuses requests that do not wait any more."""

    def __init__(self) -> None:
        super().__init__()
        self._popped: list[int] = []

    def pop(self) -> RequestView:
        view = super().pop()
        self._popped.append(view.request_id)
        return view

    def shed(self) -> Iterable[Shed]:
        popped, self._popped = self._popped, []
        return [Shed(request_id, "too late") for request_id in popped]


class AsksAboutStrangers(ByArrival):
    """Goes on asking what is in the cache for the request that it gave away last."""

    def __init__(self) -> None:
        super().__init__()
        self._last: list[RequestView] = []

    def pop(self) -> RequestView:
        self._last = [super().pop()]
        return self._last[0]

    def hints_wanted(self) -> Iterable[RequestView]:
        return self._last


class HiddenCounter(KeyedPolicy):
    """Its order depends on what other policies of the process did before."""

    _turn = itertools.count()

    def key(self, view: RequestView) -> float:
        return view.arrival_time + (next(self._turn) * 7919 % 13)


class Misspelt(ByArrival):
    """Waits for a call that does not exist."""

    def on_finished(self, view: RequestView) -> None:
        self.remove(view.request_id)


class ReadsTheClock(KeyedPolicy):
    """Orders by the time of day at which it heard of a request."""

    def key(self, view: RequestView) -> float:
        return time.time()


class DropsThePreempted(ByArrival):
    """Holds that it has served a request once it came back."""

    def push(self, view: RequestView) -> None:
        if not view.num_preemptions:
            super().push(view)


class WaitingForgetsSome(ByArrival):
    """Lists only whom it would serve soon: the rest is lost when the policy is swapped."""

    def waiting(self) -> Sequence[RequestView]:
        return list(super().waiting())[:4]


def _sample(name: str, make: Callable[[], Policy], caught_by: str) -> BrokenSample:
    provider = PolicyProvider(name=name, build=lambda context: make(), summary=f"broken: {name.replace('_', ' ')}")
    return BrokenSample(name, provider, caught_by)


BROKEN: Final[tuple[BrokenSample, ...]] = (
    _sample("loses_requests", Loses, "serves_each_request_once"),
    _sample("keeps_what_it_gave", KeepsWhatItGave, "serves_each_request_once"),
    _sample("newest_first", NewestFirst, "nobody_waits_for_ever"),
    _sample("peek_rotates", PeekRotates, "peek_changes_nothing"),
    _sample("removes_in_silence", RemovesInSilence, "removed_request_is_gone"),
    _sample("fails_on_strangers", CountsTheRunning, "hears_of_requests_that_it_never_saw"),
    _sample("keeps_views", KeepsViews, "forgets_requests_that_ended"),
    _sample("spends_the_budget", SpendsTheBudget, "share_is_a_number_of_tokens"),
    _sample("sheds_strangers", ShedsStrangers, "shed_names_waiting_requests"),
    _sample("asks_about_strangers", AsksAboutStrangers, "asks_hints_of_waiting_requests"),
    _sample("hidden_counter", HiddenCounter, "same_calls_give_the_same_order"),
    _sample("misspelt_callback", Misspelt, "its_callbacks_are_the_contracts"),
    _sample("reads_the_clock", ReadsTheClock, "same_calls_give_the_same_order"),
    _sample("drops_the_preempted", DropsThePreempted, "takes_preempted_requests_back"),
    _sample("waiting_forgets_some", WaitingForgetsSome, "serves_each_request_once"),
)
