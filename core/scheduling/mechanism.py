"""The core's side of scheduling: states, allocation, preemption, confirmation. Decisions are the scheduler plugin's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..clock import Clock, SystemClock
from ..contracts.plan import RowResult, ScheduledRequest, StepResult
from ..contracts.policy import Policy
from ..contracts.scheduler import PoolView, RequestUpdate, SchedulingMechanism
from ..errors import PlanError, RequestError
from ..kv_cache.manager import KVCacheManager
from ..request import Request, Status, WaitingReason
from .admission import check_request, prepare_request
from .limits import SchedulingLimits, check_limits, effective_window
from .plan_builder import StepPlanBuilder
from .prompt_logprobs import store_prompt_logprobs, take_prompt_logprobs
from .state import InFlightStep, SchedulingState
from .stop import stop_by_token

if TYPE_CHECKING:
    from ..engine.wire import EngineStats


_FINISHED = Status.FINISHED


class Mechanism(SchedulingMechanism):
    """Everything runs on one thread. Any number of steps may be in flight; results come in plan order.

    clock: the engine's, on which arrivals are told; the host's when not given. Raises UsageError when the limits cannot
    serve what the window allows (see limits.check_limits).
    """

    def __init__(
        self, limits: SchedulingLimits, kv: KVCacheManager, policy: Policy, clock: Clock | None = None
    ) -> None:
        self.limits = limits
        self.window = effective_window(limits.max_model_len, kv.pool.num_blocks, kv.block_size)
        check_limits(limits, self.window)
        if not limits.chunkable:
            kv.enable_prefix_caching = False  # a token's KV depends on what follows it: no prefix can be reused
        self.kv = kv
        self._block_size = kv.block_size
        self._state = SchedulingState(limits, kv, policy, clock or SystemClock())
        self._builder: StepPlanBuilder | None = None

    # What a scheduler plugin sees.

    @property
    def running(self) -> Sequence[Request]:
        return self._state.running.requests

    @property
    def pool(self) -> PoolView:
        return self.kv.pool

    def begin_plan(self) -> StepPlanBuilder:
        if self._builder is not None and not self._builder.built:
            raise PlanError("the previous plan was not built")
        self.catch_up()
        self._state.refresh_hints()
        self._builder = StepPlanBuilder(self._state)
        return self._builder

    def refuse(self, request_id: int, reason: str, status: int) -> None:
        request = self._state.requests.get(request_id)
        if request is None or request.status is not Status.WAITING:
            raise PlanError(f"request {request_id} is not waiting, it cannot be refused")
        update = _final_update(request, "error", error=reason, status=status, code="shed")
        self._state.finish(request, "error")
        self._state.pending_updates.append(update)

    def update(self, result: StepResult) -> list[RequestUpdate]:
        state = self._state
        if self._builder is not None and not self._builder.built:
            raise PlanError("a step cannot be confirmed while a plan is being built")
        step = self._oldest_step(result)
        self.kv.pool.on_step_complete(step.step_id)
        updates = self.take_updates()
        for request, planned, row in zip(step.requests, step.rows, result.rows, strict=True):
            request.num_in_flight_steps -= 1
            if request.status is _FINISHED:
                continue  # it ended while this step was in flight: what the step drew is nobody's
            update = self._confirm(request, planned, row)
            if update is not None:
                updates.append(update)
                if update.finish_reason is not None:
                    state.finish(request, update.finish_reason)
                    continue
            if request.preempt_pending and request.num_in_flight_steps == 0:
                state.preempt(request)
        state.queue_released()
        return updates

    # What the engine uses.

    def catch_up(self) -> None:
        """Does what was put off while planning, best while the device computes: the keys of blocks just scheduled. Whoever
        needs them sooner makes them.
        """
        self.kv.announce_scheduled()

    def add(self, request: Request, waiting_for: WaitingReason | None = None) -> None:
        """Queues a new request. Raises RequestError when it is refused: 400 when it can never be served, 429 when the
        queue is full.

        waiting_for: what it lacks beyond a place in the batch; `release` queues it once that is there.
        """
        state = self._state
        if request.request_id in state.requests:
            raise RequestError(f"request id {request.request_id} is in use", status=500)
        check_request(request, self.limits, self.window, self.num_waiting)
        request.client_priority = request.priority
        request.priority = request.client_priority if self.policy.uses_priority else 0
        prepare_request(request, self.window)
        request.num_cached_prompt_tokens = self.kv.hint(request)
        state.requests[request.request_id] = request
        if waiting_for is None:
            state.enqueue(request)
        else:
            state.hold(request, waiting_for)

    def release(self, request_id: int) -> None:
        """Queues a request that was waiting for something. Unknown ids are ignored: it may have been aborted
        meanwhile.
        """
        request = self._state.requests.get(request_id)
        if request is not None and request.status is Status.WAITING_FOR:
            self._state.leave_queue(request)
            self._state.enqueue(request)

    def abort(self, request_id: int) -> None:
        """Ends a request: at once when no step in flight holds it, else at its next update. Unknown ids are ignored."""
        state = self._state
        request = state.requests.get(request_id)
        if request is None:
            return
        if request.num_in_flight_steps:
            request.finish_pending = "abort"
            state.leaving[request_id] = self.kv.num_private_blocks(request)
            self.kv.withdraw(request)
            state.queue_released()
            return
        if request.status is Status.WAITING:
            self.policy.remove(request_id)
        update = _final_update(request, "abort")
        state.finish(request, "abort")
        state.pending_updates.append(update)

    def take_updates(self) -> list[RequestUpdate]:
        """Ends that came about outside `update`: aborts, refusals. Each is handed out once, here or by the next
        `update`.
        """
        updates, self._state.pending_updates = self._state.pending_updates, []
        return updates

    @property
    def policy(self) -> Policy:
        return self._state.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        """Swaps the policy between two steps: those that wait are pushed into the new one, by arrival; those that run go
        on. The scheduler's own reference is the caller's. Whatever the new policy raises comes through, and then nothing
        has changed. Raises PlanError for a policy that is in use, or that loses what it is given.
        """
        if self._builder is not None and not self._builder.built:
            raise PlanError("a policy cannot be swapped while a plan is being built")
        state = self._state
        if len(policy):
            raise PlanError(f"policy {type(policy).__name__} holds {len(policy)} requests before it was given any")
        waiting = [request for request in state.requests.values() if request.status is Status.WAITING]
        try:
            state.set_priorities(policy)
            for request in sorted(waiting, key=lambda r: (r.arrival_time, r.request_id)):
                policy.push(request)
            if len(policy) != len(waiting):
                raise PlanError(
                    f"policy {type(policy).__name__} holds {len(policy)} of the {len(waiting)} requests pushed into it"
                )
        except BaseException:
            state.set_priorities(state.policy)
            raise
        state.policy = policy

    def next_waiting(self) -> Request | None:
        """The waiting request that arrived first, whatever the policy says. O(requests)."""
        waiting = (request for request in self._state.requests.values() if request.status is Status.WAITING)
        return min(waiting, key=lambda request: (request.arrival_time, request.request_id), default=None)

    def collect_ended(self) -> None:
        """From now on `take_ended` has something to give."""
        self._state.ended = []

    def take_ended(self) -> list[Request]:
        """Requests that ended since the last call, in that order; none unless they are collected."""
        ended, self._state.ended = self._state.ended or [], None if self._state.ended is None else []
        return ended

    @property
    def num_runnable(self) -> int:
        """Requests that run, or wait for nothing but their turn."""
        return len(self._state.running) + self._state.num_queued

    @property
    def num_running(self) -> int:
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        return self._state.num_queued + self._state.num_waiting_for

    @property
    def num_unfinished(self) -> int:
        """Requests whose end has not been handed out."""
        return len(self._state.requests) + len(self._state.pending_updates)

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._state.in_flight)

    @property
    def num_pending_removals(self) -> int:
        """Requests that the runner still holds and that have stopped running; they go with the next plan."""
        return len(self._state.pending_removals)

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes in unreferenced blocks; whether none is left."""
        return self.kv.reset_prefix_cache()

    def fill_stats(self, stats: EngineStats) -> None:
        """Sets the gauges and counters that belong to scheduling. O(running)."""
        state = self._state
        stats.num_running = self.num_running
        stats.num_waiting = self.num_waiting
        stats.kv_usage = self.kv.usage()
        stats.kv_waste = self.kv.waste(state.running.requests)
        stats.num_preemptions_recompute = state.num_preemptions
        stats.prefix_queries = state.prefix_queries
        stats.prefix_hits = state.prefix_hits

    def check_integrity(self) -> None:
        """Audits blocks, index and counts. Raises PoolIntegrityError or PlanError. O(blocks + requests): when idle, and
        in tests.
        """
        state = self._state
        self.kv.check_integrity(state.requests.values())
        faults = self.kv.pending.faults(
            state.running.requests,
            [r for r in state.requests.values() if r.waiting_for is WaitingReason.PREFIX],
        )
        if faults:
            raise PlanError("waiting for blocks in flight is broken: " + "; ".join(faults[:20]))
        state.check_policy()
        for request in state.requests.values():
            if request.status is not Status.RUNNING and (request.block_ids or request.num_in_flight_steps):
                raise PlanError(
                    f"request {request.request_id} is {request.status.value} and still holds blocks or is in flight"
                )

    # Confirmation of one row.

    def _oldest_step(self, result: StepResult) -> InFlightStep:
        state = self._state
        if not state.in_flight or state.in_flight[0].step_id != result.step_id:
            expected = state.in_flight[0].step_id if state.in_flight else "none"
            raise PlanError(f"result of step {result.step_id}, but the oldest step in flight is {expected}")
        step = state.in_flight.popleft()
        # Against what was planned, not against the plan's own rows: those were in a plugin's hands.
        if [row.request_id for row in result.rows] != [request.request_id for request in step.requests]:
            raise PlanError(f"the rows of the result of step {result.step_id} are not those of its plan")
        return step

    def _confirm(self, request: Request, planned: ScheduledRequest, row: RowResult) -> RequestUpdate | None:
        """Moves the request's confirmed state past this step; None when the client learns nothing from it."""
        if request.finish_pending is not None:
            return _final_update(request, request.finish_pending)
        if row.error is not None:
            return _final_update(request, "error", error=row.error)
        tokens = row.token_ids
        if len(tokens) != planned.samples:
            raise PlanError(
                f"request {request.request_id}: {len(tokens)} tokens drawn in step with samples={planned.samples}"
            )
        computed = request.num_computed_tokens + planned.num_tokens
        request.num_computed_tokens = computed
        finish: str | None = None
        stop_reason: int | None = None
        if planned.samples:
            outputs = request.output_token_ids
            outputs.append(tokens[0])
            request.num_placeholders -= 1
            if tokens[0] in request.stopping_ids and (stop := stop_by_token(request, tokens[0])) is not None:
                finish, stop_reason = stop
            elif len(outputs) >= request.max_tokens:
                finish = "length"
        elif request.max_tokens == 0 and computed >= len(request.prompt_token_ids):
            finish = "length"
        if computed >= (request.num_hashed_blocks + 1) * self._block_size:
            self.kv.index_computed(request)
        first_token = request.first_token_time is None and bool(tokens)
        if first_token:
            request.first_token_time = self._state.clock.now()
        prompt_logprobs = None
        if request.prompt_logprobs_pending:
            store_prompt_logprobs(request, row.prompt_logprobs)
            prompt_logprobs = take_prompt_logprobs(request)
        if not tokens and finish is None and prompt_logprobs is None:
            return None
        if tokens and self._state.on_tokens is not None:
            self._state.on_tokens(request, len(tokens))
        update = RequestUpdate(
            request.request_id,
            tokens,
            finish,
            stop_reason,
            row.logprobs,
            prompt_logprobs,
            request.num_cached_prompt_tokens,
        )
        if first_token:
            _add_times(update, request)
        return update


def _add_times(update: RequestUpdate, request: Request) -> None:
    """How long the request waited, and how long its first token took from there."""
    started, first = request.first_scheduled_time, request.first_token_time
    if started is not None and first is not None:
        update.queue_seconds = max(0.0, started - request.arrival_time)
        update.prefill_seconds = first - started


def _final_update(
    request: Request, reason: str, *, error: str | None = None, status: int = 500, code: str | None = None
) -> RequestUpdate:
    """The last word about a request that ends without a token."""
    was_admitted = request.status is Status.RUNNING or request.num_preemptions > 0
    return RequestUpdate(
        request.request_id,
        [],
        reason,
        num_cached_tokens=request.num_cached_prompt_tokens if was_admitted else 0,
        error=error,
        error_status=status,
        error_code=code,
    )
