"""The step pipeline of design.md section 4. One thread owns everything here: scheduler, mechanism, executor's front."""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..clock import Clock
from ..contracts.executor import Executor
from ..contracts.observer import StepObservation
from ..contracts.plan import StepPlan, StepResult
from ..contracts.policy import Policy
from ..contracts.scheduler import RequestUpdate, Scheduler
from ..contracts.victim import VictimRule
from ..errors import PlanError, RequestError
from ..request import Request
from ..scheduling.mechanism import Mechanism
from ..scheduling.progress import force_progress
from .observers import ObserverSet
from .prompt_ids import outside_width
from .request_processors import RequestProcessors
from .wire import EngineRequest, EngineStats

logger = logging.getLogger("hotswap.engine")

PATIENCE_TURNS = 8  # turns in which nothing was planned and nothing is in flight before the core plans by itself


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step between `execute` and its result."""

    step_id: int
    num_tokens: int
    schedule_seconds: float


class EngineCore:
    """Plans, executes, confirms. Knows no process, no socket and no text.

    max_steps_in_flight: 1 is synchronous; with 2 the next step is planned and queued while the current one runs.
    processors: the logits processors that a request may name. observers: told of requests and steps.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        *,
        max_steps_in_flight: int,
        logits_width: int,
        processors: RequestProcessors | None = None,
        observers: ObserverSet | None = None,
    ) -> None:
        self.mechanism = mechanism
        self.scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._max_steps_in_flight = max_steps_in_flight
        self._logits_width = logits_width
        self._processors = processors or RequestProcessors()
        self._observers = observers or ObserverSet()
        self._in_flight: deque[_Flight] = deque()
        self._num_idle_turns = 0  # in a row, although somebody could run
        self._has_insisted = False
        self._stats = EngineStats()
        if self._observers.wants_ends:
            mechanism.collect_ended()

    def add_request(self, message: EngineRequest) -> RequestUpdate | None:
        """Queues a request. A refusal (too long, queue full) comes back as its final update instead of an exception, so
        that a fault of one request can never reach the loop."""
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling=message.sampling,
            arrival_time=message.arrival_time,
            priority=message.priority,
            user=message.user,
            deadline=message.deadline,
            cache_salt=message.cache_salt,
            adapter_key=message.adapter_key,
        )
        try:
            self._check_numbers(message)
            asked = message.sampling.logits_processors
            message.sampling.logits_processors = self._processors.check(asked)
            self.mechanism.add(request)
        except RequestError as error:
            return RequestUpdate(
                message.request_id,
                [],
                finish_reason="error",
                error=error.message,
                error_status=error.status,
                error_code=error.code,
                error_param=error.param,
            )
        self._observers.arrived(request)
        return None

    def _check_numbers(self, message: EngineRequest) -> None:
        """The front end has checked them; an id out of range would write into a neighbour's row, so nothing is trusted."""
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(message.sampling, name)
            if wanted is not None and wanted > self._logits_width:
                raise RequestError(f"{name}: {wanted} alternatives of {self._logits_width} tokens", param=name)
        if message.prompt_token_ids and not _all_below(message.prompt_token_ids, self._logits_width):
            raise outside_width(message.prompt_token_ids, self._logits_width)
        message.sampling.check_token_ids(self._logits_width)

    def abort(self, request_ids: Iterable[int]) -> None:
        """Ends requests; those in flight end at their update. Unknown ids are ignored."""
        for request_id in request_ids:
            self.mechanism.abort(request_id)

    def has_work(self) -> bool:
        """Whether `step` can make progress."""
        return bool(self._in_flight) or self.mechanism.num_unfinished > 0

    def step(self) -> list[RequestUpdate]:
        """Fills the pipeline, then confirms its oldest step. Blocks until that one is done."""
        while len(self._in_flight) < self._max_steps_in_flight:
            plan = self._plan()
            if plan is None:
                break
            self.executor.execute(plan)
            self.executor.sample(plan, None)
        self.mechanism.catch_up()
        updates = self.mechanism.take_updates()
        if self._in_flight:
            updates += self._confirm(self.executor.next_result())
        if self._observers.wants_ends:
            self._observers.ended(self.mechanism.take_ended(), self._clock.now())
        return updates

    def _plan(self) -> StepPlan | None:
        started = self._clock.now()
        plan = self.scheduler.schedule()
        if self.mechanism.num_steps_in_flight != len(self._in_flight) + (plan is not None):
            raise PlanError("the scheduler did not return the plan that it built, or one that it did not build")
        if plan is None and (plan := self._insist()) is None:
            return None
        self._num_idle_turns = 0
        stats, seconds = self._stats, self._clock.now() - started
        self._in_flight.append(_Flight(plan.step_id, plan.num_tokens, seconds))
        stats.num_steps += 1
        stats.num_scheduled_tokens += plan.num_tokens
        stats.last_step_tokens = plan.num_tokens
        stats.schedule_seconds = seconds
        stats.step_tokens.observe(plan.num_tokens)
        stats.schedule_times.observe(seconds)
        return plan

    def _insist(self) -> StepPlan | None:
        """The scheduler planned nothing. When that goes on with nothing in flight and somebody able to run, a step of the
        core's own: progress is guaranteed whatever a policy's share or a scheduler says."""
        mechanism = self.mechanism
        if self._in_flight or not mechanism.num_runnable:
            self._num_idle_turns = 0
            return None
        self._num_idle_turns += 1
        if self._num_idle_turns < PATIENCE_TURNS:
            return None
        plan = force_progress(mechanism)
        who = f"scheduler {type(self.scheduler).__name__} with policy {type(mechanism.policy).__name__}"
        if plan is None and self._num_idle_turns > 2 * PATIENCE_TURNS and mechanism.num_runnable:
            raise PlanError(f"{who} plans nothing although {mechanism.num_runnable} requests could run")
        if plan is not None and not self._has_insisted:
            self._has_insisted = True
            logger.warning("%s plans nothing although requests could run: the core takes them one by one", who)
        return plan

    def _confirm(self, result: StepResult) -> list[RequestUpdate]:
        flight = self._in_flight.popleft()
        stats, started = self._stats, self._clock.now()
        updates = self.scheduler.update(result)
        stats.execute_seconds = result.execute_seconds
        stats.update_seconds = self._clock.now() - started
        stats.execute_times.observe(stats.execute_seconds)
        stats.update_times.observe(stats.update_seconds)
        if self._observers.wants_steps:
            self._observers.stepped(
                StepObservation(
                    step_id=flight.step_id,
                    num_tokens=flight.num_tokens,
                    num_requests=len(result.rows),
                    num_running=self.mechanism.num_running,
                    num_waiting=self.mechanism.num_waiting,
                    kv_usage=self.mechanism.kv.usage(),
                    schedule_seconds=flight.schedule_seconds,
                    execute_seconds=stats.execute_seconds,
                    update_seconds=stats.update_seconds,
                )
            )
        return updates

    def set_policy(self, policy: Policy, victim: VictimRule | None = None) -> None:
        """Swaps the policy between two steps, and the victim rule when one is given. What runs or is in flight goes on; what
        waits is pushed into the new policy. Whatever that one or the scheduler raises comes through, and then nothing has
        changed."""
        scheduler = self.scheduler
        before = scheduler.policy, scheduler.victim
        try:
            scheduler.policy = policy
            if victim is not None:
                scheduler.victim = victim
            self.mechanism.policy = policy  # last: it happens as a whole or not at all
        except BaseException:
            scheduler.policy, scheduler.victim = before
            raise
        self._num_idle_turns = 0
        self._has_insisted = False

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix. False when some blocks are in use and therefore stay."""
        return self.mechanism.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """A snapshot; O(running)."""
        self.mechanism.fill_stats(self._stats)
        self._stats.num_observer_faults = self._observers.num_faults
        return self._stats

    def close_observers(self) -> None:
        """The engine stops, for whatever reason. Idempotent."""
        self._observers.close()

    def shutdown(self) -> None:
        """Ends the executor, then the observers; steps in flight are dropped."""
        try:
            self.executor.shutdown()
        finally:
            self.close_observers()


def _all_below(token_ids: list[int], width: int) -> bool:
    """Whether every one is an integer in 0..width - 1, in one pass over the objects of a list that can be long."""
    try:
        packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error:
        return False
    return int(np.frombuffer(packed, dtype="<u4").max()) < width
