"""Observers with one fault each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, Final

from ...contracts.observer import FinishedRequest, Observer, StepObservation
from ...contracts.policy import RequestView
from ...contracts.provider import Provider
from . import BrokenSample


class KnowsEveryRequest(Observer):
    """Expects the arrival of everybody who ends."""

    def __init__(self) -> None:
        self._arrivals: dict[int, float] = {}
        self.seconds = 0.0

    def on_arrival(self, view: RequestView) -> None:
        self._arrivals[view.request_id] = view.arrival_time

    def on_finish(self, request: FinishedRequest) -> None:
        self.seconds += request.finish_time - self._arrivals.pop(request.request_id)


class AsksTheViewLater(Observer):
    """Reads a view when the request ends."""

    def __init__(self) -> None:
        self._views: dict[int, RequestView] = {}
        self.num_preemptions = 0

    def on_arrival(self, view: RequestView) -> None:
        self._views[view.request_id] = view

    def on_finish(self, request: FinishedRequest) -> None:
        view = self._views.pop(request.request_id, None)
        if view is not None:
            self.num_preemptions += view.num_preemptions


class CollectsViews(Observer):
    """Keeps the last views, to look at them some day."""

    def __init__(self) -> None:
        self._views: list[RequestView] = []

    def on_arrival(self, view: RequestView) -> None:
        self._views = [*self._views[-20:], view]


class WritesAtOnce(Observer):
    """Waits for something slow in every step."""

    def on_step(self, step: StepObservation) -> None:
        time.sleep(0.001)


class KeepsEverything(Observer):
    """A list of all that ended."""

    def __init__(self) -> None:
        self._ended: list[FinishedRequest] = []

    def on_finish(self, request: FinishedRequest) -> None:
        self._ended.append(request)


class DividesByNothing(Observer):
    """A mean at the end, also of no requests."""

    def __init__(self) -> None:
        self._tokens: int = 0
        self._requests: int = 0
        self.mean = 0.0

    def on_finish(self, request: FinishedRequest) -> None:
        self._requests += 1
        self._tokens += request.num_output_tokens

    def close(self) -> None:
        self.mean = self._tokens / self._requests


class LeavesItsThread(Observer):
    """Starts a thread and never ends it."""

    def __init__(self) -> None:
        threading.Thread(target=threading.Event().wait, args=(30,), name="observer", daemon=True).start()


class OneForTheProcess(Observer):
    """All of the process write to one place, which the first to close takes away."""

    _place: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self._place["count"] = 0

    def on_finish(self, request: FinishedRequest) -> None:
        self._place["count"] += 1

    def close(self) -> None:
        self._place.clear()


class NeedsTokens(Observer):
    """Takes for granted that everybody who ends had a first token."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def on_finish(self, request: FinishedRequest) -> None:
        self.seconds += request.first_token_time - request.arrival_time  # type: ignore[operator]


class Misspelt(Observer):
    """Waits for a call that does not exist, beside one that does."""

    def on_step(self, step: StepObservation) -> None:
        pass

    def on_finished(self, request: FinishedRequest) -> None:
        print(request)


class HearsNothing(Observer):
    """Overrides nothing."""


def _sample(name: str, make: Callable[[], Observer], caught_by: str) -> BrokenSample:
    provider: Provider[Observer] = Provider(
        name=name, build=lambda context: make(), summary=f"broken: {name.replace('_', ' ')}"
    )
    return BrokenSample(name, provider, caught_by)


BROKEN: Final[tuple[BrokenSample, ...]] = (
    _sample("misspelt_callback", Misspelt, "hears_of_something"),
    _sample("hears_nothing", HearsNothing, "hears_of_something"),
    _sample("knows_every_request", KnowsEveryRequest, "takes_events_in_any_order"),
    _sample("needs_tokens", NeedsTokens, "takes_events_in_any_order"),
    _sample("asks_the_view_later", AsksTheViewLater, "uses_no_view_after_the_callback"),
    _sample("collects_views", CollectsViews, "keeps_no_views"),
    _sample("writes_at_once", WritesAtOnce, "callbacks_are_quick"),
    _sample("keeps_everything", KeepsEverything, "does_not_grow"),
    _sample("divides_by_nothing", DividesByNothing, "close_without_events"),
    _sample("leaves_its_thread", LeavesItsThread, "close_is_quick_and_ends_its_threads"),
    _sample("one_for_the_process", OneForTheProcess, "two_observers_share_nothing"),
)
