"""Policy `deadline`: earliest deadline first, and whoever can no longer make it is refused instead of served too late.

Serving by earliest deadline is optimal on one machine as long as all can be met (Liu and Layland, "Scheduling Algorithms for
Multiprogramming in a Hard-Real-Time Environment", 1973). Beyond that it spends its time on those that are about to be late, and
many are. So hopeless requests are shed, as in databases with firm deadlines (Haritsa, Livny and Carey, "Earliest Deadline
Scheduling for Real-Time Database Systems", 1991). What counts for a served language model is goodput: how many requests meet
their TTFT and TPOT in a second (Zhong et al., "DistServe", OSDI 2024, arXiv 2401.09670).

A waiting request is late when the time until its first token, were it admitted now, passes its deadline. That time is learnt
from those that were admitted: a line over the prompt tokens that they had to compute, in which old ones fade.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.policy import PolicyContext, PolicyProvider, RequestView, Shed

from .keyed_queue import KeyedQueue
from .queued import QueuedPolicy

MIN_LEARNT = 8  # first tokens, before anybody is refused
MEMORY = 32  # first tokens that count most in the estimate
MARGIN = 1.0  # mean errors of the estimate that are allowed for


class DeadlineOptions(BaseModel):
    """What may follow `--plugin policy=deadline,`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_seconds: float = Field(
        default=2.0,
        gt=0,
        allow_inf_nan=False,
        description="When the first token is due after arrival, for a request without a deadline of its own.",
    )
    tpot_seconds: float = Field(
        default=0.1,
        ge=0,
        allow_inf_nan=False,
        description="How much later each further token is due: says how urgent a preempted request is.",
    )


class PrefillEstimate:
    """Seconds from admission to first token, as a line over the tokens to compute: least squares in which the weight of older
    observations falls geometrically. Both its offset and its slope are at least 0. O(1) a call.
    """

    def __init__(self) -> None:
        self.num_learnt = 0
        self.error = 0.0  # mean distance between what was predicted and what came, seconds
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A request with so many tokens to compute had its first token after so long."""
        fade = 1.0 - 1.0 / MEMORY
        if self.num_learnt:
            share = max(1.0 - fade, 1.0 / self.num_learnt)
            self.error += (abs(self.seconds(num_tokens) - seconds) - self.error) * share
        self._weight = self._weight * fade + 1.0
        self._x = self._x * fade + num_tokens
        self._y = self._y * fade + seconds
        self._xx = self._xx * fade + num_tokens * num_tokens
        self._xy = self._xy * fade + num_tokens * seconds
        self.num_learnt += 1

    def seconds(self, num_tokens: int) -> float:
        """The prediction; 0 before anything was learnt."""
        if not self.num_learnt:
            return 0.0
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        slope = 0.0
        if variance > 1e-6 * x * x:
            slope = min(max(0.0, (self._xy / self._weight - x * y) / variance), y / x)
        return y + slope * (num_tokens - x)


@dataclass(slots=True)
class _Started:
    """A request that was admitted here and has no token yet: when, and what it had to compute."""

    time: float
    num_tokens: int


class Deadline(QueuedPolicy[tuple[float, float]]):
    """By the moment at which the next token is due, then by arrival. Only requests that have never run are refused.

    While nobody is on the way to a first token, only a deadline that has passed counts: a wrong estimate would else refuse
    everybody, and never be put right.
    """

    def __init__(self, options: DeadlineOptions, clock: Callable[[], float]) -> None:
        super().__init__()
        self._ttft = options.ttft_seconds
        self._tpot = options.tpot_seconds
        self._clock = clock
        self._estimate = PrefillEstimate()
        self._started: dict[int, _Started] = {}
        self._never_ran: KeyedQueue[tuple[float, float]] = KeyedQueue()  # those of the queue that may still be refused

    def key(self, view: RequestView) -> tuple[float, float]:
        return self.due(view), view.arrival_time

    def due(self, view: RequestView) -> float:
        """When the next token should be there, in seconds on the engine's clock."""
        first = view.arrival_time + self._ttft if view.deadline is None else view.deadline
        return first + self._tpot * view.num_output_tokens

    def push(self, view: RequestView) -> None:
        super().push(view)
        self._started.pop(view.request_id, None)
        if not view.num_preemptions:
            self._never_ran.put(view, self.key(view))

    def remove(self, request_id: int) -> None:
        super().remove(request_id)
        if request_id in self._never_ran:
            self._never_ran.remove(request_id)

    def shed(self) -> Iterable[Shed]:
        if self._estimate.num_learnt < MIN_LEARNT:
            return ()
        now = self._clock()
        given_up = []
        while (view := self._never_ran.first()) is not None:
            needed = self._seconds_needed(view) if self._started else 0.0
            if now + needed <= self.due(view):
                break
            self._never_ran.remove(view.request_id)
            given_up.append(self._refusal(view, now, self._seconds_needed(view)))
        return given_up

    def on_scheduled(self, view: RequestView, num_tokens: int) -> None:
        if view.num_output_tokens or view.num_preemptions or view.request_id in self._started:
            return
        to_compute = view.num_prompt_tokens - (view.num_scheduled_tokens - num_tokens)
        if to_compute > 0:
            self._started[view.request_id] = _Started(self._clock(), to_compute)

    def on_tokens(self, view: RequestView, num_tokens: int) -> None:
        started = self._started.pop(view.request_id, None)
        if started is not None:
            self._estimate.learn(started.num_tokens, self._clock() - started.time)

    def on_finish(self, view: RequestView) -> None:
        self._started.pop(view.request_id, None)

    def _seconds_needed(self, view: RequestView) -> float:
        """Until its first token, were it admitted now."""
        to_compute = view.num_prompt_tokens - view.num_cached_prompt_tokens
        return self._estimate.seconds(to_compute) + MARGIN * self._estimate.error

    def _refusal(self, view: RequestView, now: float, needed: float) -> Shed:
        due, waited = self.due(view), max(0.0, now - view.arrival_time)
        allowed = due - view.arrival_time
        reason = (
            f"the first token was to be there {allowed:.2f} s after the request arrived, and can no longer be: it has waited "
            f"{waited:.2f} s and needs about {needed:.2f} s more"
        )
        if needed > allowed:
            return Shed(
                view.request_id, f"{reason}. At present that is too much for this server even without a queue", 503
            )
        return Shed(view.request_id, f"{reason}. The server is overloaded: try again later", 429)


@hookimpl
def hotswap_policy() -> Iterator[PolicyProvider]:
    def build(context: PolicyContext) -> Deadline:
        options = context.options if isinstance(context.options, DeadlineOptions) else DeadlineOptions()
        return Deadline(options, context.clock.now)

    yield PolicyProvider(
        name="deadline",
        build=build,
        options=DeadlineOptions,
        summary="the earliest deadline first; refuses what can no longer make it",
    )
