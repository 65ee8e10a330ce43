"""Tells observers what happens, and keeps what they raise away from the loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..contracts.observer import FinishedRequest, Observer, StepObservation
from ..request import Request

logger = logging.getLogger("hotswap.observers")

CLOSE_SECONDS = 1.0  # what the contract gives each observer


@dataclass(frozen=True, slots=True)
class _Listener:
    described: str
    call: Callable[[Any], None]


class ObserverSet:
    """Built once: (description for messages, observer) in the operator's order. One thread: the scheduling thread's.

    Callbacks that an observer left as they are, are not called. num_faults: exceptions so far.
    """

    def __init__(self, observers: Sequence[tuple[str, Observer]] = ()) -> None:
        self._observers = tuple(observers)
        self._arrival = self._overriding("on_arrival")
        self._step = self._overriding("on_step")
        self._finish = self._overriding("on_finish")
        self._logged: set[tuple[str, str]] = set()
        self._closed = False
        self.num_faults = 0

    def _overriding(self, callback: str) -> tuple[_Listener, ...]:
        return tuple(
            _Listener(described, getattr(observer, callback))
            for described, observer in self._observers
            if getattr(type(observer), callback) is not getattr(Observer, callback)
        )

    @property
    def wants_steps(self) -> bool:
        return bool(self._step)

    @property
    def wants_ends(self) -> bool:
        return bool(self._finish)

    def arrived(self, request: Request) -> None:
        if self._arrival:
            self._tell(self._arrival, "on_arrival", request)

    def stepped(self, step: StepObservation) -> None:
        self._tell(self._step, "on_step", step)

    def ended(self, requests: Iterable[Request], now: float) -> None:
        """now: seconds on the engine's clock."""
        for request in requests:
            self._tell(self._finish, "on_finish", _finished(request, now))

    def close(self) -> None:
        """Ends them, one after the other, and waits for each as long as the contract allows. Idempotent."""
        if self._closed or not self._observers:
            return
        self._closed = True
        closers = [_Listener(described, lambda _, o=observer: o.close()) for described, observer in self._observers]  # type: ignore[misc]
        # A thread of its own: an observer that hangs must not keep the engine.
        thread = threading.Thread(target=self._tell, args=(closers, "close", None), name="observers-close", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS * len(closers))

    def _tell(self, listeners: Iterable[_Listener], callback: str, fact: Any) -> None:
        for listener in listeners:
            try:
                listener.call(fact)
            except Exception:  # an observer may raise anything; it is a guest here
                self.num_faults += 1
                if (listener.described, callback) not in self._logged:
                    self._logged.add((listener.described, callback))
                    logger.exception("%s: %s() raised; more of these are counted only", listener.described, callback)


def _finished(request: Request, now: float) -> FinishedRequest:
    return FinishedRequest(
        request_id=request.request_id,
        finish_reason=request.finish_reason or "",
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_prompt_tokens=request.num_cached_prompt_tokens,
        num_preemptions=request.num_preemptions,
        arrival_time=request.arrival_time,
        first_scheduled_time=request.first_scheduled_time,
        first_token_time=request.first_token_time,
        finish_time=now,
        user=request.user,
        priority=request.client_priority,
    )
