"""Where every request is, and the only code that moves one from state to state.

    add -> WAITING_FOR -> WAITING (in the policy) -> RUNNING -> FINISHED
               ^            |  ^                        |
               +-- prefix --+  +------- preempted ------+
A request that stops running, for whatever reason, is listed in `pending_removals` until a plan tells the runner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from ..clock import Clock
from ..contracts.plan import ScheduledRequest
from ..contracts.policy import Policy, RequestView
from ..contracts.scheduler import RequestUpdate
from ..errors import PlanError
from ..kv_cache.manager import KVCacheManager
from ..request import Request, Status, WaitingReason
from .limits import SchedulingLimits
from .running import RunningSet

TokenCallback = Callable[[RequestView, int], None]
MAX_HINTS_PER_STEP = 32  # a look-up costs some microseconds, more for a long prefix


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A plan that was built and not confirmed yet: requests and rows in plan order."""

    step_id: int
    requests: list[Request]
    rows: list[ScheduledRequest]


class SchedulingState:
    """Shared by the mechanism and its plan builder; nobody else sees it."""

    def __init__(self, limits: SchedulingLimits, kv: KVCacheManager, policy: Policy, clock: Clock) -> None:
        self.limits = limits
        self.kv = kv
        self.clock = clock
        self.requests: dict[int, Request] = {}  # every unfinished request
        self.running = RunningSet()
        self.num_queued = 0  # in the policy
        self.num_waiting_for = 0
        self.leaving: dict[int, int] = {}  # running requests that stop at a coming update -> blocks that then come free
        self.prefilling: dict[int, Request] = {}  # running requests whose known tokens are not all scheduled yet
        self.in_flight: deque[InFlightStep] = deque()
        self.next_step_id = 0
        self.pending_removals: list[int] = []
        self.pending_updates: list[RequestUpdate] = []
        self.ended: list[Request] | None = None  # those that ended, for observers; None when there are none
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens
        self.prefix_hits = 0  # tokens
        self.policy = policy

    @property
    def policy(self) -> Policy:
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        """Takes effect at once; waiting requests are moved by the mechanism. Callbacks that the policy left as they are
        cost nothing.
        """
        self._policy = policy
        kind = type(policy)
        self.on_scheduled: TokenCallback | None = (
            policy.on_scheduled if kind.on_scheduled is not Policy.on_scheduled else None
        )
        self.on_tokens: TokenCallback | None = policy.on_tokens if kind.on_tokens is not Policy.on_tokens else None
        self._wants_hints = kind.hints_wanted is not Policy.hints_wanted

    def set_priorities(self, policy: Policy) -> None:
        """Every request's priority as this policy sees it: the client's, or 0 where priorities are not used."""
        for request in self.requests.values():
            request.priority = request.client_priority if policy.uses_priority else 0
        self.running.resort()

    def enqueue(self, request: Request) -> None:
        """Into the policy's queue: new, released, or preempted."""
        request.status = Status.WAITING
        request.waiting_for = None
        self.num_queued += 1
        self.policy.push(request)

    def refresh_hints(self) -> None:
        """Looks up how much the waiting requests that the policy asks about would save now. O(1) requests. Raises PlanError
        when one of them does not wait.
        """
        if not self._wants_hints:
            return
        for view in list(islice(self.policy.hints_wanted(), MAX_HINTS_PER_STEP)):
            request = self.requests.get(view.request_id)
            if request is not view or request.status is not Status.WAITING:
                raise PlanError(f"the policy asks for the hint of request {view.request_id}, which does not wait")
            self._refresh_hint(request)

    def _refresh_hint(self, request: Request) -> None:
        if request.num_preemptions == 0:  # else the number is what the first admission saved, for `usage`
            request.num_cached_prompt_tokens = self.kv.renewed_hint(request)

    def hold(self, request: Request, reason: WaitingReason) -> None:
        """Waits for something that the policy cannot give."""
        request.status = Status.WAITING_FOR
        request.waiting_for = reason
        self.num_waiting_for += 1

    def hold_for_prefix(self, request: Request, key: bytes) -> None:
        """From the queue, whose entry the caller has taken, to those that wait for a block that another one computes."""
        self.leave_queue(request)
        self.kv.pending.wait(request, key)
        request.num_holds += 1
        self.hold(request, WaitingReason.PREFIX)

    def queue_released(self) -> None:
        """Back into the queue: whose block has come, or will not come. To be called after whatever may have released
        somebody, between two steps.
        """
        if self.kv.pending.has_released:
            for request in self.kv.pending.take_released():
                self.leave_queue(request)
                self._refresh_hint(request)
                self.enqueue(request)

    def leave_queue(self, request: Request) -> None:
        """Out of the waiting states; the policy's own entry was taken or is taken by the caller."""
        if request.status is Status.WAITING_FOR:
            self.num_waiting_for -= 1
            if request.waiting_for is WaitingReason.PREFIX:
                self.kv.pending.forget_waiter(request)
        else:
            self.num_queued -= 1

    def start(self, request: Request) -> None:
        """Waiting to running; blocks and counts are set by the plan builder."""
        self.leave_queue(request)
        request.status = Status.RUNNING
        self.running.add(request)

    def stop_running(self, request: Request) -> None:
        """Blocks back to the pool (once the last step in flight that holds them is complete), slot back to the
        runner.
        """
        self.running.remove(request)
        self.leaving.pop(request.request_id, None)
        self.prefilling.pop(request.request_id, None)
        self.pending_removals.append(request.request_id)
        self.kv.release(request, after=request.last_step_id)
        request.preempt_pending = False

    def preempt(self, request: Request) -> None:
        """Running to waiting, by recompute. Nothing of the request may be in flight."""
        if request.num_in_flight_steps or request.num_placeholders:
            raise PlanError(
                f"request {request.request_id} cannot be preempted while {request.num_in_flight_steps} steps hold it"
            )
        self.stop_running(request)
        request.num_computed_tokens = 0
        request.num_scheduled_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.enqueue(request)

    def finish(self, request: Request, reason: str) -> None:
        """Ends a request in any state; its queue entry, if it waits, is removed by the caller. Steps that still hold it
        are confirmed without it.
        """
        if request.status is Status.RUNNING:
            self.stop_running(request)
        else:
            self.leave_queue(request)
        request.status = Status.FINISHED
        request.finish_pending = None
        request.finish_reason = reason
        del self.requests[request.request_id]
        if self.ended is not None:
            self.ended.append(request)
        self.policy.on_finish(request)

    def protected(self) -> Request | None:
        """The first request in service order that is not on its way out. It is never preempted, so it always gets
        on.
        """
        return next((r for r in self.running.requests if r.request_id not in self.leaving), None)

    def num_blocks_reserved(self) -> int:
        """Blocks that running requests still need for tokens known today. O(requests in prefill)."""
        if not self.prefilling:
            return 0
        return sum(self.kv.num_blocks_for(r.num_known_tokens) - len(r.block_ids) for r in self.prefilling.values())

    def num_blocks_coming(self) -> int:
        """Blocks that come free by themselves at coming updates; an estimate, since some may be shared."""
        return sum(self.leaving.values()) + self.kv.pool.num_deferred_references

    def check_policy(self) -> None:
        """Raises PlanError when the policy lost or invented a waiting request."""
        if len(self.policy) != self.num_queued:
            raise PlanError(
                f"policy {type(self.policy).__name__} holds {len(self.policy)} waiting requests, "
                f"but {self.num_queued} were given to it"
            )
