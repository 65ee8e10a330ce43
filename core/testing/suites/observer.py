"""Conformance of kind `observer`."""

from __future__ import annotations

import gc
import statistics
import threading
import time
import tracemalloc
import weakref
from typing import Any, ClassVar

from hypothesis import strategies as st

from ...contracts.observer import FinishedRequest, Observer, StepObservation
from ..scheduling_harness import fake_request
from ..views import ReadOnlyView
from .base import ConformanceSuite

CLOSE_SECONDS = 2.0  # the contract says one; a loaded machine may take longer
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrival", "step", "finish"]),
        st.integers(0, 8),
        st.sampled_from(["stop", "length", "abort", "error"]),
    ),
    max_size=30,
)


def finished(request_id: int, reason: str = "length") -> FinishedRequest:
    """A request's end. One that was aborted or refused in the queue has no times but two."""
    queued = reason in ("abort", "error")
    return FinishedRequest(
        request_id=request_id,
        finish_reason=reason,
        num_prompt_tokens=5 + request_id % 7,
        num_output_tokens=0 if queued else 12,
        num_cached_prompt_tokens=request_id % 3,
        num_preemptions=request_id % 2,
        arrival_time=float(request_id),
        first_scheduled_time=None if queued else request_id + 0.25,
        first_token_time=None if queued else request_id + 0.5,
        finish_time=request_id + 2.0,
        user=f"user {request_id}",
        priority=request_id % 3 - 1,
    )


def step(step_id: int) -> StepObservation:
    """A confirmed step; the first is empty."""
    return StepObservation(
        step_id=step_id,
        num_tokens=step_id % 64,
        num_requests=min(step_id, 8),
        num_running=min(step_id, 8),
        num_waiting=step_id % 5,
        kv_usage=step_id % 11 / 10,
        schedule_seconds=0.0001,
        execute_seconds=0.02,
        update_seconds=0.0001,
    )


def _own(observer: Observer) -> set[str]:
    """The names that the plugin's own classes define."""
    return {
        name
        for cls in type(observer).__mro__
        if issubclass(cls, Observer) and cls is not Observer
        for name in vars(cls)
    }


class ObserverSuite(ConformanceSuite):
    """max_microseconds: what a callback may take, at the median. max_growth_bytes: what 2000 requests may leave behind."""

    kind = "observer"
    max_microseconds: ClassVar[float] = 200.0
    max_growth_bytes: ClassVar[int] = 70_000

    def arrive(self, observer: Observer, request_id: int) -> ReadOnlyView:
        """One arrival; the view is dead when the callback has returned."""
        view = ReadOnlyView(fake_request(request_id, range(1 + request_id % 9), user=f"user {request_id}"))
        observer.on_arrival(view)
        view.expire()
        return view

    def test_hears_of_something(self) -> None:
        """It overrides a callback, and whatever it has that is called `on_...` is one: another name is never called."""
        product: Observer = self.build()
        self.check_callbacks(product)
        heard = [name for name in ("on_arrival", "on_step", "on_finish") if name in _own(product)]
        assert heard, "it overrides none of on_arrival, on_step and on_finish: nobody tells it anything"

    def test_takes_events_in_any_order(self) -> None:
        """No order of events raises: a request may end that never arrived here, arrive and never run, end in the queue."""

        def check(events: list[tuple[str, int, str]]) -> None:
            observer: Observer = self.build()
            for name, number, reason in events:
                if name == "arrival":
                    self.arrive(observer, number)
                elif name == "step":
                    observer.on_step(step(number))
                else:
                    observer.on_finish(finished(number, reason))
            observer.close()

        self.for_all(20, check, events=EVENTS)

    def test_close_without_events(self) -> None:
        """An engine may stop before it has served anybody."""
        self.build().close()

    def test_uses_no_view_after_the_callback(self) -> None:
        """A view is live, and belongs to `on_arrival`: later it is about another state, or nothing."""
        observer: Observer = self.build()
        for number in range(20):
            self.arrive(observer, number)
        for number in range(20):
            observer.on_step(step(number))
            observer.on_finish(finished(number, ("stop", "abort")[number % 2]))
        observer.close()

    def test_keeps_no_views(self) -> None:
        """After the callback nothing of the observer's leads to the view: it would keep the request alive."""
        observer: Observer = self.build()
        references = [weakref.ref(self.arrive(observer, number)) for number in range(50)]
        gc.collect()
        kept = sum(reference() is not None for reference in references)
        assert not kept, f"{kept} of 50 views are still held after their callbacks"
        observer.close()

    def test_callbacks_are_quick(self) -> None:
        """Each callback delays every request: the median of one stays in microseconds."""
        observer: Observer = self.build()
        view = ReadOnlyView(fake_request(1, range(8)))
        calls: dict[str, tuple[Any, Any]] = {
            "on_arrival": (observer.on_arrival, view),
            "on_step": (observer.on_step, step(5)),
            "on_finish": (observer.on_finish, finished(1)),
        }
        for name, (callback, argument) in calls.items():
            taken = []
            for _ in range(201):
                started = time.perf_counter()
                callback(argument)
                taken.append(time.perf_counter() - started)
            median = 1e6 * statistics.median(taken)
            assert median <= self.max_microseconds, f"{name} takes {median:.0f} microseconds"
        observer.close()

    def test_does_not_grow(self) -> None:
        """What an observer holds does not grow with the requests that ended: an engine runs for months."""
        observer: Observer = self.build()

        def serve(numbers: range) -> None:
            for number in numbers:
                self.arrive(observer, number)
                observer.on_step(step(number))
                observer.on_finish(finished(number, ("stop", "length", "abort", "error")[number % 4]))

        serve(range(1000))  # fills what is of a fixed size
        tracemalloc.start()
        try:
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            serve(range(1000, 3000))
            # What a thread of the observer's has yet to write out is no growth: it is given the time.
            deadline = time.perf_counter() + CLOSE_SECONDS
            while True:
                gc.collect()
                after, _ = tracemalloc.get_traced_memory()
                if after - before <= self.max_growth_bytes or time.perf_counter() > deadline:
                    break
                time.sleep(0.02)
        finally:
            tracemalloc.stop()
        observer.close()
        assert after - before <= self.max_growth_bytes, f"it grew by {after - before} bytes over 2000 requests"

    def test_close_is_quick_and_ends_its_threads(self) -> None:
        """`close` returns within a second or so, and no thread of the observer's outlives it: the engine waits."""
        before = set(threading.enumerate())
        observer: Observer = self.build()
        for number in range(50):
            self.arrive(observer, number)
            observer.on_finish(finished(number))
        started = time.perf_counter()
        observer.close()
        taken = time.perf_counter() - started
        assert taken <= CLOSE_SECONDS, f"close() took {taken:.1f} s"
        for thread in set(threading.enumerate()) - before:
            thread.join(CLOSE_SECONDS)
            assert not thread.is_alive(), f"thread {thread.name!r} is left behind"

    def test_two_observers_share_nothing(self) -> None:
        """An engine that stops leaves the observer of another engine in the same process alone."""
        first, second = self.build(), self.build()
        first.close()
        for number in range(5):
            self.arrive(second, number)
            second.on_step(step(number))
            second.on_finish(finished(number))
        second.close()
