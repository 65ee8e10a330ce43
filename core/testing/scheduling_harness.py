"""Drives a scheduler, its policy and its victim rule against the real mechanism and the scripted executor.

    harness = SchedulingHarness(lambda mechanism: MyScheduler(mechanism, policy, victim), policy)
    harness.add(fake_request(0, prompt=range(10), max_tokens=5))
    harness.drain()
    assert harness.ended[0].token_ids == harness.expected_tokens(0)
Every schedule and every confirmation is followed by an audit of blocks and counts, and by a watch on progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..contracts.plan import PositionLogprobs, StepPlan
from ..contracts.policy import Policy
from ..contracts.scheduler import RequestUpdate, Scheduler
from ..kv_cache.manager import KVCacheManager
from ..request import Request, Status, WaitingReason
from ..sampling_params import SamplingParams
from ..scheduling.limits import SchedulingLimits
from ..scheduling.mechanism import Mechanism
from ..scheduling.plan_builder import HOLD_SHARE, MAX_HOLDS
from .scripted_executor import Script, ScriptedExecutor

PREFIX_SEED = b"scheduling harness"


class SchedulingFault(AssertionError):
    """Something that no scheduler, policy or victim rule may do to a request."""


@dataclass(slots=True)
class EndedRequest:
    """What a client would have got."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    error_status: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs] | None = None


def fake_request(
    request_id: int,
    prompt: Iterable[int] = (1, 2, 3),
    *,
    arrival_time: float | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    adapter_key: str = "",
    user: str = "",
    **sampling: Any,
) -> Request:
    """A request whose arrival time is its id unless given; keyword arguments beyond the named ones are
    SamplingParams.
    """
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(**sampling),
        arrival_time=float(request_id) if arrival_time is None else arrival_time,
        priority=priority,
        user=user,
        cache_salt=cache_salt,
        adapter_key=adapter_key,
    )


def counting_script(request_id: int, index: int) -> int:
    """Tokens that tell requests and positions apart, so that a mixed-up row is seen."""
    return 1000 + request_id * 100 + index


class SchedulingHarness:
    """One engine without a model. `confirmed` and `ended` hold what was handed out so far, by request.

    computes_once: whether it is a fault to admit a request while a running one computes enough of the blocks that it lacks
    next. Here a single block can be enough: prompts are short.
    """

    def __init__(
        self,
        make_scheduler: Callable[[Mechanism], Scheduler],
        policy: Policy,
        *,
        num_blocks: int = 16,
        block_size: int = 4,
        max_steps_in_flight: int = 2,
        script: Script = counting_script,
        errors: Callable[[int, int], str | None] = lambda request_id, index: None,
        enable_prefix_caching: bool = True,
        computes_once: bool = False,
        kv: KVCacheManager | None = None,
        limits: SchedulingLimits | None = None,
        **changed_limits: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 48,
            "min_tokens_awaited": 1,
        }
        self.limits = limits or SchedulingLimits(**(defaults | changed_limits))
        self.kv = kv or KVCacheManager(
            num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, prefix_seed=PREFIX_SEED
        )
        self.mechanism = Mechanism(self.limits, self.kv, policy)
        self.scheduler = make_scheduler(self.mechanism)
        self.max_steps_in_flight = max_steps_in_flight
        self.requests: dict[int, Request] = {}
        self.executor = ScriptedExecutor(
            self.kv.pool.num_blocks,
            self.kv.block_size,
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            script=script,
            errors=errors,
            requests=self.requests,
        )
        self.confirmed: dict[int, EndedRequest] = {}
        self.ended: dict[int, EndedRequest] = {}
        self.plans: list[StepPlan] = []
        self._script = script
        self._computes_once = computes_once
        self._num_known_at_admission: dict[int, int] = {}
        self._first: tuple[int, int, int] = (-1, -1, -1)  # first running request, its tokens, its preemptions
        self._num_idle_confirmations = 0

    def add(self, request: Request, waiting_for: WaitingReason | None = None) -> None:
        """Raises RequestError when it is refused."""
        self.requests[request.request_id] = request
        self.mechanism.add(request, waiting_for)
        self.confirmed[request.request_id] = EndedRequest()

    def abort(self, request_id: int) -> None:
        self.mechanism.abort(request_id)
        self._audit()

    def schedule(self) -> StepPlan | None:
        """Plans and executes one step, if there is room in the pipeline and something to do."""
        if self.executor.num_in_flight >= self.max_steps_in_flight:
            return None
        plan = self.scheduler.schedule()
        if plan is not None:
            self.executor.execute(plan)
            self.executor.sample(plan, None)
            self.plans.append(plan)
            self._check_admitted(plan)
        self._take(self.mechanism.take_updates())
        self._audit()
        return plan

    def confirm(self) -> list[RequestUpdate]:
        """Confirms the oldest step in flight, if there is one."""
        if self.executor.num_in_flight == 0:
            return []
        updates = self.scheduler.update(self.executor.next_result())
        self._take(updates)
        self._audit()
        self._watch_progress()
        return updates

    def step(self) -> list[RequestUpdate]:
        """What the engine does in one turn: fill the pipeline, confirm its oldest step."""
        while self.schedule() is not None:
            pass
        return self.confirm()

    def drain(self, max_turns: int = 5000) -> None:
        """Runs until every request ended, then checks that the pool is whole. Raises SchedulingFault when that does not
        come about.
        """
        for _ in range(max_turns):
            if self.mechanism.num_unfinished == 0 and self.executor.num_in_flight == 0:
                break
            self.step()
        else:
            left = sorted(set(self.confirmed) - set(self.ended))
            raise SchedulingFault(f"after {max_turns} turns requests {left} have not ended")
        self.check_whole()

    def check_whole(self) -> None:
        """Nothing runs, so nothing may be held. Raises SchedulingFault."""
        pool = self.kv.pool
        if pool.num_free_blocks != pool.num_blocks:
            raise SchedulingFault(
                f"idle, but {pool.num_blocks - pool.num_free_blocks} of {pool.num_blocks} blocks are not free"
            )
        missing = set(self.confirmed) - set(self.ended)
        if missing:
            raise SchedulingFault(f"requests {sorted(missing)} are gone without an end")

    def expected_tokens(self, request_id: int) -> list[int]:
        """What this request must produce when it is neither aborted nor broken, from the definition of its
        parameters.
        """
        request = self.requests[request_id]
        sampling = request.sampling
        window = min(self.limits.max_model_len, self.kv.pool.num_blocks * self.kv.block_size)
        room = window - len(request.prompt_token_ids)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sampling.eos_token_ids))
        tokens: list[int] = []
        while len(tokens) < limit:
            tokens.append(self._script(request_id, len(tokens)))
            if tokens[-1] in stops and len(tokens) >= sampling.min_tokens:
                break
        return tokens

    def _take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            if update.request_id in self.ended:
                raise SchedulingFault(f"request {update.request_id} ended before and is reported again")
            got = self.confirmed[update.request_id]
            got.token_ids += update.new_token_ids
            got.num_cached_tokens = update.num_cached_tokens
            if update.prompt_logprobs is not None:
                if got.prompt_logprobs is not None:
                    raise SchedulingFault(f"request {update.request_id}: prompt log-probabilities are handed out twice")
                got.prompt_logprobs = update.prompt_logprobs
            if update.finish_reason is not None:
                got.finish_reason, got.stop_reason = update.finish_reason, update.stop_reason
                got.error, got.error_status = update.error, update.error_status
                self.ended[update.request_id] = got

    def _audit(self) -> None:
        self.mechanism.check_integrity()
        for request in self.requests.values():
            if request.status is Status.WAITING_FOR and request.waiting_for is WaitingReason.PREFIX:
                self._check_held(request)
        if self.mechanism.num_running > self.limits.max_num_seqs:
            raise SchedulingFault(f"{self.mechanism.num_running} requests run, at most {self.limits.max_num_seqs} may")

    def _check_held(self, request: Request) -> None:
        """Whoever is held back for a prefix shares a block that steps in flight compute for a running request."""
        for view in self.mechanism.running:
            producer = self.requests[view.request_id]
            shared = _num_shared_tokens(request, producer) // self.kv.block_size
            in_flight = producer.num_scheduled_tokens // self.kv.block_size
            delivers = producer.num_in_flight_steps > 0 and producer.finish_pending is None
            if delivers and min(shared, in_flight) > producer.num_computed_tokens // self.kv.block_size:
                return
        raise SchedulingFault(f"request {request.request_id} is held back, and nobody computes what it waits for")

    def _check_admitted(self, plan: StepPlan) -> None:
        """Nobody is admitted to compute a block that a running request has in flight."""
        starts = {row.request_id: row.num_scheduled_tokens_before for row in plan.scheduled}
        self._num_known_at_admission |= {new.request_id: len(new.token_ids) for new in plan.new}
        is_new = {new.request_id: new.num_computed_tokens for new in plan.new}
        budget = self.limits.max_num_batched_tokens
        for row in plan.scheduled:
            starts[row.request_id] += row.num_tokens  # what is scheduled once this row is
            request = self.requests[row.request_id]
            if row.request_id in is_new and self._computes_once and self.kv.can_match(request):
                self._check_computed_once(request, is_new[row.request_id], starts, budget)
            budget -= row.num_tokens

    def _check_computed_once(self, request: Request, start: int, scheduled: dict[int, int], budget: int) -> None:
        """start: the first token that the request computes. scheduled: the counts of those in the plan, so far. budget: what
        was left of the step."""
        block_size, num_known = self.kv.block_size, request.num_known_tokens
        if request.num_holds >= MAX_HOLDS:
            return
        now = min(num_known - start, budget)
        enough = min(now, max(self.limits.min_tokens_awaited, now / HOLD_SHARE))
        for view in self.mechanism.running:
            other = self.requests[view.request_id]
            if other is request or other.finish_pending is not None:
                continue
            most = min(
                scheduled.get(other.request_id, other.num_scheduled_tokens),
                self._num_known_at_admission[other.request_id],
                _num_shared_tokens(request, other),
            )
            most = min(most, num_known - 1) // block_size * block_size
            if other.num_computed_tokens < start + block_size and most - start >= enough:
                raise SchedulingFault(
                    f"request {request.request_id} is admitted to compute tokens {start} to {most}, "
                    f"which request {other.request_id} has in flight"
                )

    def _watch_progress(self) -> None:
        """The first running request is never preempted, and gets on at least once in a pipeline's length."""
        running = self.mechanism.running
        request = running[0] if running else None
        if request is None:
            self._num_idle_confirmations = 0
            self._first = (-1, -1, -1)
            return
        now = (request.request_id, request.num_computed_tokens, request.num_preemptions)
        if now[0] == self._first[0] and now[2] > self._first[2] and not request.preempt_pending:
            raise SchedulingFault(f"request {request.request_id} was preempted although it was first in service order")
        self._num_idle_confirmations = self._num_idle_confirmations + 1 if now == self._first else 0
        self._first = now
        if self._num_idle_confirmations > 2 * self.max_steps_in_flight:
            raise SchedulingFault(f"request {request.request_id} is first in service order and does not get on")


def _num_shared_tokens(request: Request, other: Request) -> int:
    """Known tokens from the first on that are the same in both, for the same tenant and adapter."""
    if (request.adapter_key, request.cache_salt) != (other.adapter_key, other.cache_salt):
        return 0
    count = 0
    for mine, theirs in zip(_known(request), _known(other), strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _known(request: Request) -> list[int]:
    return request.prompt_token_ids + request.output_token_ids
