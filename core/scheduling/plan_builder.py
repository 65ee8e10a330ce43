"""One step under construction: what a scheduler asks for is checked, granted, and turned into the plan's deltas."""

from __future__ import annotations

from collections.abc import Sequence

from ..contracts.plan import NewRequest, ScheduledRequest, StepPlan
from ..contracts.policy import Budget, RequestView
from ..contracts.scheduler import PlanBuilder, RequestUpdate
from ..errors import PlanError
from ..request import Request, Status
from .state import InFlightStep, SchedulingState

_RUNNING = Status.RUNNING
# Waits a request. One that delivers takes a good part off what the request lacks, so few do; what could go on for ever, with
# others passing by, are waits for producers that are aborted or fail.
MAX_HOLDS = 100
HOLD_SHARE = 4  # a request waits when 1 / 4 of what it would compute in this step is being computed for others
HEADROOM_SHARE = 50  # of the pool: at most 1 / 50 stays free at admission, for the growth of those that run


class StepPlanBuilder(PlanBuilder):
    """Made by Mechanism.begin_plan. A request that lacks blocks closes the step for admission: what comes free is for
    those that run, in service order.
    """

    def __init__(self, state: SchedulingState) -> None:
        self._state = state
        self._live = state.requests
        self._leaving = state.leaving
        self._prefilling = state.prefilling
        self._kv = state.kv
        self._block_size = state.kv.block_size
        self._ref_counts = state.kv.pool.ref_counts
        self.chunked = state.limits.chunked
        self._on_scheduled = state.on_scheduled
        self._step_id = state.next_step_id
        self._requests: list[Request] = []
        self._rows: list[ScheduledRequest] = []
        self._new: list[NewRequest] = []
        self._shortages: dict[int, int] = {}  # request -> blocks that it lacked when it was last asked for
        self._num_claimed = 0  # blocks that come free at coming updates and that somebody in this step waits for
        self._under_pressure = False  # somebody was asked to yield for one that runs
        self._built = False
        # What was found out last, about whom, so that acting on it need not find it out again: until anything is granted, or
        # turns out to be lacking.
        self._last_wanted: tuple[RequestView | None, int] = (None, 0)
        self._last_admissible: tuple[RequestView | None, int] = (None, 0)
        self._last_awaited: tuple[RequestView | None, bytes | None] = (None, None)
        # Whoever waits for a prefix keeps a seat: those behind it do not push it back, and as many wait as can run.
        self.budget = Budget(
            num_tokens=state.limits.max_num_batched_tokens,
            num_requests=state.limits.max_num_seqs - len(state.running) - state.kv.pending.num_waiting,
        )

    # Running requests.

    def num_tokens_wanted(self, view: RequestView) -> int:
        request = self._live.get(view.request_id)
        if request is not view or request.status is not _RUNNING or request.last_step_id == self._step_id:
            return 0
        if self._leaving and request.request_id in self._leaving:
            return 0
        num_outputs = len(request.output_token_ids) + request.num_placeholders
        if num_outputs >= request.max_tokens and request.num_placeholders:
            return 0  # the last token is being drawn; nobody will need its KV
        wanted = len(request.prompt_token_ids) + num_outputs - request.num_scheduled_tokens
        self._last_wanted = (view, wanted)
        return wanted

    def can_schedule(self, view: RequestView, num_tokens: int) -> bool:
        if num_tokens > self.budget.num_tokens:
            return False
        if view.num_scheduled_tokens + num_tokens <= view.num_blocks * self._block_size:
            return True
        return self.num_blocks_missing(view, num_tokens) == 0

    def num_blocks_missing(self, view: RequestView, num_tokens: int) -> int:
        request = self._running(view)
        wanted = self._kv.num_blocks_for(request.num_scheduled_tokens + num_tokens) - len(request.block_ids)
        missing = max(0, wanted - self._kv.pool.num_free_blocks)
        if missing:
            self._shortages[request.request_id] = missing
            self._close_admission()
        else:
            self._shortages.pop(request.request_id, None)
        return missing

    def schedule(self, view: RequestView, num_tokens: int) -> None:
        if self._built:
            self._check_open()
        last_view, wanted = self._last_wanted
        if last_view is not view:
            wanted = self.num_tokens_wanted(view)
        if (
            not 0 < num_tokens <= wanted
            or num_tokens > self.budget.num_tokens
            or not (self.chunked or num_tokens == wanted)
        ):
            raise self._misuse(view, num_tokens, wanted)
        request = self._live[view.request_id]
        before = request.num_scheduled_tokens
        blocks = request.block_ids
        if before % self._block_size and self._ref_counts[blocks[before // self._block_size]] > 1:
            block = blocks[before // self._block_size]
            raise PlanError(f"request {request.request_id} would write into block {block}, which others share")
        fresh = None
        if before + num_tokens > len(blocks) * self._block_size:
            fresh = [self._kv.grow(request, before + num_tokens)]
        computes_known_tokens = bool(self._prefilling) and request.request_id in self._prefilling
        self._forget_findings()
        self._place(request, before, num_tokens, num_tokens == wanted, fresh)
        if computes_known_tokens:
            self._kv.announce(request)

    def schedule_decodes(self) -> int:
        self._check_open()
        kv, block_size, ref_counts = self._kv, self._block_size, self._ref_counts
        leaving, prefilling = self._leaving, self._prefilling
        self._forget_findings()
        running = self._state.running.requests
        for settled, request in enumerate(running):
            if not self.budget.num_tokens:
                return settled
            num_outputs = len(request.output_token_ids) + request.num_placeholders
            before = request.num_scheduled_tokens
            wanted = len(request.prompt_token_ids) + num_outputs - before
            if (
                wanted == 0
                or (request.num_placeholders and num_outputs >= request.max_tokens)
                or request.request_id in leaving
                or request.last_step_id == self._step_id
            ):
                continue  # as num_tokens_wanted says
            place, used = divmod(before, block_size)
            if wanted > 1 or request.request_id in prefilling or (used and ref_counts[request.block_ids[place]] > 1):
                return settled
            fresh = None
            if place == len(request.block_ids):
                if not kv.pool.num_free_blocks:
                    return settled
                fresh = [kv.grow(request, before + 1)]
            self._place(request, before, 1, True, fresh)
        return len(running)

    def is_scheduled(self, view: RequestView) -> bool:
        request = self._live.get(view.request_id)
        return request is not None and request.last_step_id == self._step_id

    # Waiting requests.

    def num_tokens_to_admit(self, view: RequestView) -> int:
        request = self._waiting(view)
        return request.num_known_tokens - len(self._kv.match(request)) * self._block_size

    def can_admit(self, view: RequestView, num_tokens: int) -> bool:
        admissible = self._reason_against(self._waiting(view), num_tokens) is None
        self._last_admissible = (view, num_tokens) if admissible else (None, 0)
        return admissible

    def admit(self, view: RequestView, num_tokens: int) -> None:
        self._check_open()
        request = self._waiting(view)
        if self._last_admissible != (view, num_tokens) and (reason := self._reason_against(request, num_tokens)):
            raise PlanError(f"request {request.request_id} cannot be admitted with {num_tokens} tokens: {reason}")
        hits = self._kv.match(request)
        num_cached = len(hits) * self._block_size
        num_known = request.num_known_tokens
        self._kv.open_table(request, hits, num_cached + num_tokens)
        self._state.start(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._state.clock.now()
        self.budget.num_requests -= 1
        request.num_computed_tokens = request.num_scheduled_tokens = num_cached
        if request.num_preemptions == 0:
            request.num_cached_prompt_tokens = num_cached
            if self._kv.can_match(request):
                self._state.prefix_queries += request.num_prompt_tokens
                self._state.prefix_hits += num_cached
        if num_cached + num_tokens < num_known:
            self._state.prefilling[request.request_id] = request
        self._new.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=request.prompt_token_ids + request.output_token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                block_ids=[request.block_ids.copy()],
                num_computed_tokens=num_cached,
            )
        )
        self._forget_findings()
        self._place(request, num_cached, num_tokens, num_cached + num_tokens == num_known, None)
        self._kv.announce(request)

    def can_hold(self, view: RequestView) -> bool:
        key = self._key_to_wait_for(self._waiting(view))
        self._last_awaited = (view, key)
        return key is not None

    def hold(self, view: RequestView) -> None:
        self._check_open()
        request = self._waiting(view)
        last_view, key = self._last_awaited
        if last_view is not view:
            key = self._key_to_wait_for(request)
        if key is None:
            raise PlanError(
                f"request {request.request_id} cannot be held back: nobody computes enough of its next blocks"
            )
        self._forget_findings()
        self._state.hold_for_prefix(request, key)
        self.budget.num_requests -= 1

    def _key_to_wait_for(self, request: Request) -> bytes | None:
        """Waiting costs the request a step or two, and the step the tokens that would have filled it. It saves the device what
        is in flight: worth it when that is no trifle, in itself and beside what the request would compute in this step; or
        all of that, when the request would be no further after this step.
        """
        if self.budget.num_requests <= 0 or request.num_holds >= MAX_HOLDS:
            return None
        awaited = self._kv.awaited(request)
        if awaited is None:
            return None
        lacking = request.num_known_tokens - len(self._kv.match(request)) * self._block_size
        now = min(lacking, self.budget.num_tokens)
        enough = min(now, max(self._state.limits.min_tokens_awaited, now / HOLD_SHARE))
        return awaited.key if awaited.num_tokens >= enough else None

    def _reason_against(self, request: Request, num_tokens: int) -> str | None:
        """Why a waiting request cannot join the step; None when it can."""
        state, kv = self._state, self._kv
        num_running = len(state.running)
        if self.budget.num_requests <= 0:
            return (
                f"all seats of the batch are taken: {num_running} requests run, {kv.pending.num_waiting} are held back"
            )
        if self._under_pressure or self._shortages:
            return "running requests wait for blocks"
        if num_tokens > self.budget.num_tokens:
            return f"{self.budget.num_tokens} tokens are left of the step"
        hits = kv.match(request)
        num_cached = len(hits) * self._block_size
        to_admit = request.num_known_tokens - num_cached
        if not 0 < num_tokens <= to_admit or not (self.chunked or num_tokens == to_admit):
            return f"it has {to_admit} tokens to compute" + ("" if self.chunked else ", all in one step")
        reserved, tokens = 0, num_cached + num_tokens
        if num_running:
            # Without room for its whole prompt beside those that run it would only be preempted again.
            reserved, tokens = state.num_blocks_reserved(), request.num_known_tokens
            reserved += min(num_running, kv.pool.num_blocks // HEADROOM_SHARE)
        if kv.num_blocks_for(tokens) + reserved <= kv.pool.num_free_blocks:
            return None  # even if it had no hit in use
        needed = kv.num_blocks_to_take(hits, tokens) + reserved
        if needed > kv.pool.num_free_blocks:
            return f"it needs {needed} free blocks, {kv.pool.num_free_blocks} are there"
        return None

    # Preemption.

    def preemption_candidates(self, needy: RequestView | None) -> Sequence[RequestView]:
        running = self._state.running
        first = 0
        if needy is not None:
            self._under_pressure = True
            self._close_admission()
            request = self._running(needy)
            missing = self._shortages.get(request.request_id, 0)
            if missing <= self._state.num_blocks_coming() - self._num_claimed:
                self._num_claimed += missing
                return ()
            first = running.position(request) + 1
        protected = self._state.protected()
        return [r for r in running.requests[first:] if r is not protected and self._may_yield(r)]

    def preempt(self, view: RequestView) -> bool:
        self._check_open()
        self._forget_findings()
        request = self._running(view)
        if request is self._state.protected() or not self._may_yield(request):
            raise PlanError(
                f"request {request.request_id} must not be preempted: it is protected (first in service order), "
                "in this plan already, or on its way out"
            )
        if request.num_in_flight_steps:
            request.preempt_pending = True
            self._state.leaving[request.request_id] = self._kv.num_private_blocks(request)
            return False
        self._state.preempt(request)
        self.budget.num_requests += 1
        return True

    def _may_yield(self, request: Request) -> bool:
        return request.last_step_id != self._step_id and request.request_id not in self._state.leaving

    # The plan.

    def build(self) -> StepPlan | None:
        self._check_open()
        self._built = True
        state = self._state
        state.check_policy()
        if not self._rows:
            self._end_hopeless()
            return None
        state.in_flight.append(InFlightStep(self._step_id, self._requests, self._rows))
        state.next_step_id += 1
        removed, state.pending_removals = state.pending_removals, []
        return StepPlan(
            step_id=self._step_id,
            new=self._new,
            removed=removed,
            scheduled=self._rows,
            num_tokens=state.limits.max_num_batched_tokens - self.budget.num_tokens,
        )

    @property
    def built(self) -> bool:
        return self._built

    def _end_hopeless(self) -> None:
        """Ends the first request when it has the pool to itself and still lacks blocks. The check at the door rules
        that out; if it happens all the same, that request ends and the rest is served.
        """
        state = self._state
        if state.in_flight or state.leaving or not len(state.running):
            return
        request = state.running.requests[0]
        if request.request_id not in self._shortages or self.preemption_candidates(request):
            return
        update = RequestUpdate(request.request_id, [], "length", num_cached_tokens=request.num_cached_prompt_tokens)
        if not request.output_token_ids:
            update.finish_reason = "error"
            update.error = f"the KV cache of {self._kv.pool.num_blocks} blocks cannot hold this request"
        state.finish(request, update.finish_reason or "")
        state.pending_updates.append(update)

    def _place(
        self, request: Request, before: int, num_tokens: int, reaches_end: bool, new_block_ids: list[list[int]] | None
    ) -> None:
        """The row itself: counts, budget, callbacks. What was found out before no longer holds: see _forget_findings."""
        request.num_scheduled_tokens = before + num_tokens
        request.num_in_flight_steps += 1
        request.last_step_id = self._step_id
        samples = False
        if reaches_end:
            samples = len(request.output_token_ids) + request.num_placeholders < request.max_tokens
            request.num_placeholders += samples
            if self._prefilling:
                self._prefilling.pop(request.request_id, None)
        self.budget.num_tokens -= num_tokens
        self._requests.append(request)
        self._rows.append(ScheduledRequest(request.request_id, num_tokens, before, samples, new_block_ids))
        if self._on_scheduled is not None:
            self._on_scheduled(request, num_tokens)

    def _close_admission(self) -> None:
        """Whoever was found admissible before somebody lacked blocks is so no longer."""
        self._last_admissible = (None, 0)

    def _forget_findings(self) -> None:
        self._last_wanted = (None, 0)
        self._last_admissible = (None, 0)
        self._last_awaited = (None, None)

    # Checks.

    def _check_open(self) -> None:
        if self._built:
            raise PlanError(f"plan {self._step_id} was built already")

    def _running(self, view: RequestView) -> Request:
        request = self._live.get(view.request_id)
        if request is not view or request.status is not _RUNNING:
            raise PlanError(f"request {view.request_id} is not running")
        return request

    def _waiting(self, view: RequestView) -> Request:
        request = self._live.get(view.request_id)
        if request is not view or request.status is not Status.WAITING:
            raise PlanError(f"request {view.request_id} is not waiting")
        return request

    def _misuse(self, view: RequestView, num_tokens: int, wanted: int) -> PlanError:
        """Why `schedule` refuses."""
        request = self._running(view)
        name = f"request {request.request_id}"
        if request.last_step_id == self._step_id:
            return PlanError(f"{name} is in this plan already")
        if num_tokens > self.budget.num_tokens:
            return PlanError(f"{num_tokens} tokens for {name}, but only {self.budget.num_tokens} are left of the step")
        if 0 < num_tokens < wanted:
            return PlanError(f"{num_tokens} of {wanted} tokens for {name}, but prompts are not split here")
        return PlanError(f"{num_tokens} tokens for {name}, which wants {wanted}")
