"""Kind `observer`: is told what the engine does, and changes nothing. Any number are active; the operator names each.

Called on the engine's scheduling thread, between steps, so every call delays every request: keep it to microseconds and
hand slow work to a thread of your own. An observer that raises is logged and counted, once a kind of call, and goes on
being called; it never reaches the loop.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from .policy import RequestView
from .provider import BuildContext


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One confirmed step. Seconds are host time: planning, the worker's own time, confirming.

    num_tokens: tokens computed. num_running, num_waiting: requests after the step. kv_usage: 0 to 1.
    """

    step_id: int
    num_tokens: int
    num_requests: int
    num_running: int
    num_waiting: int
    kv_usage: float
    schedule_seconds: float
    execute_seconds: float
    update_seconds: float


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that ended. Times are seconds on the engine's clock; None where it never came so far.

    finish_reason: "stop", "length", "abort" or "error".
    """

    request_id: int
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_prompt_tokens: int
    num_preemptions: int
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finish_time: float
    user: str
    priority: int


class Observer(ABC):  # noqa: B024 - every callback is optional
    """Override what you want to hear of; what stays as it is costs nothing, for the core leaves it out."""

    def on_arrival(self, view: RequestView) -> None:
        """A request was queued. The view is live: keep its facts, not the view."""

    def on_step(self, step: StepObservation) -> None:
        """A step was confirmed."""

    def on_finish(self, request: FinishedRequest) -> None:
        """A request ended, for whatever reason but the end of the engine itself: then `close` is the last word."""

    def close(self) -> None:
        """The engine stops. Called once; may take its time, a second at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverContext(BuildContext):
    """An observer needs nothing beyond the common context."""


__all__ = ["BuildContext", "FinishedRequest", "Observer", "ObserverContext", "RequestView", "StepObservation"]
