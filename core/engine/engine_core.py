"""The step pipeline of design.md section 4. One thread owns everything here: scheduler, mechanism, executor's front."""

from __future__ import annotations

from collections.abc import Iterable

from ..clock import Clock
from ..contracts.executor import Executor
from ..contracts.scheduler import RequestUpdate, Scheduler
from ..errors import PlanError, RequestError
from ..request import Request
from ..scheduling.mechanism import Mechanism
from .wire import EngineRequest, EngineStats


class EngineCore:
    """Plans, executes, confirms. Knows no process, no socket and no text.

    max_steps_in_flight: 1 is synchronous; with 2 the next step is planned and queued while the current one runs.
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
    ) -> None:
        self.mechanism = mechanism
        self.scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._max_steps_in_flight = max_steps_in_flight
        self._logits_width = logits_width
        self._num_in_flight = 0
        self._stats = EngineStats()

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
            adapter_id=message.adapter_id,
        )
        try:
            self._check_token_ids(message)
            self.mechanism.add(request)
        except RequestError as error:
            return RequestUpdate(
                message.request_id, [], finish_reason="error", error=error.message, error_status=error.status
            )
        return None

    def _check_token_ids(self, message: EngineRequest) -> None:
        """The front end has checked them; an id out of range would write into a neighbour's row, so nothing is trusted."""
        ids = message.prompt_token_ids
        if ids and not (min(ids) >= 0 and max(ids) < self._logits_width):
            raise RequestError(f"prompt: a token id is outside 0..{self._logits_width - 1}", param="prompt")
        message.sampling.check_token_ids(self._logits_width)

    def abort(self, request_ids: Iterable[int]) -> None:
        """Ends requests; those in flight end at their update. Unknown ids are ignored."""
        for request_id in request_ids:
            self.mechanism.abort(request_id)

    def has_work(self) -> bool:
        """Whether `step` can make progress."""
        return self._num_in_flight > 0 or self.mechanism.num_unfinished > 0

    def step(self) -> list[RequestUpdate]:
        """Fills the pipeline, then confirms its oldest step. Blocks until that one is done."""
        started = self._clock.now()
        while self._num_in_flight < self._max_steps_in_flight:
            plan = self.scheduler.schedule()
            if self.mechanism.num_steps_in_flight != self._num_in_flight + (plan is not None):
                raise PlanError("the scheduler did not return the plan that it built, or one that it did not build")
            if plan is None:
                break
            self.executor.execute(plan)
            self.executor.sample(plan, None)
            self._num_in_flight += 1
            self._stats.num_steps += 1
            self._stats.num_scheduled_tokens += plan.num_tokens
            self._stats.last_step_tokens = plan.num_tokens
        self._stats.schedule_seconds = self._clock.now() - started
        updates = self.mechanism.take_updates()
        if self._num_in_flight:
            result = self.executor.next_result()
            self._num_in_flight -= 1
            self._stats.execute_seconds = result.execute_seconds
            started = self._clock.now()
            updates += self.scheduler.update(result)
            self._stats.update_seconds = self._clock.now() - started
        return updates

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix. False when some blocks are in use and therefore stay."""
        return self.mechanism.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """A snapshot; O(running)."""
        self.mechanism.fill_stats(self._stats)
        return self._stats

    def shutdown(self) -> None:
        """Ends the executor; steps in flight are dropped."""
        self.executor.shutdown()
