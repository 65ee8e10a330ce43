"""Kind `scheduler`: composes the core's mechanism, a policy and a victim rule into step plans.

The mechanism (core/scheduling/) owns states, blocks and counts; a scheduler decides. It never touches a block itself: it asks
a `PlanBuilder`, which refuses an illegal plan with `PlanError`. Everything here runs on the engine's scheduling thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ..errors import PlanError
from .plan import PositionLogprobs, StepPlan, StepResult
from .policy import Budget, Policy, RequestView
from .provider import BuildContext
from .victim import VictimRule


class PoolView(Protocol):
    """Read-only facts about the KV block pool."""

    @property
    def num_blocks(self) -> int:
        """Usable blocks; the null block is not counted."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, those that hold evictable prefixes included."""
        ...

    @property
    def block_size(self) -> int: ...


class RequestUpdate(msgspec.Struct, array_like=True):
    """What changed for one request in `update`. `finish_reason` None means it goes on.

    finish_reason: "stop", "length", "abort" or "error". stop_reason: the stop token id, when one of stop_token_ids ended it.
    prompt_logprobs: entries of positions 1 .. prompt length - 1, all at once and only once.
    error_status, error_code, error_param: as in RequestError, when `error` says why it ended.
    queue_seconds, prefill_seconds: arrival to first scheduled, first scheduled to first token; with the first token only.
    """

    request_id: int
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_status: int = 500
    error_code: str | None = None
    error_param: str | None = None
    queue_seconds: float | None = None
    prefill_seconds: float | None = None


class PlanBuilder(ABC):
    """One step under construction. Every method raises PlanError on misuse; nothing that it granted can be overspent."""

    budget: Budget  # what is left; owned by the builder
    chunked: bool  # False: a request gets every token that it wants in one step, or none

    @abstractmethod
    def num_tokens_wanted(self, view: RequestView) -> int:
        """Tokens between scheduled and known (placeholders included); 0 when the request has nothing to do in this step."""

    @abstractmethod
    def can_schedule(self, view: RequestView, num_tokens: int) -> bool:
        """Whether blocks for `num_tokens` more tokens of a running request are there now."""

    @abstractmethod
    def num_blocks_missing(self, view: RequestView, num_tokens: int) -> int:
        """How many blocks `can_schedule` lacks; 0 when they are there."""

    @abstractmethod
    def schedule(self, view: RequestView, num_tokens: int) -> None:
        """Puts a running request into the step and allocates. At most once per request and plan."""

    def schedule_decodes(self) -> int:
        """Puts one token of each running request into the step, in service order, for as long as one is what each wants and
        tokens and blocks are there; those that want nothing are passed over. How many running requests are settled by that:
        the scheduler decides about those behind them. Called first of all, and at most once: it is what asking about every
        one of them would come to where the policy limits nobody's share, in a fraction of the time.
        """
        return 0

    @abstractmethod
    def num_tokens_to_admit(self, view: RequestView) -> int:
        """Tokens that a waiting request would have to compute after its prefix hit."""

    @abstractmethod
    def can_admit(self, view: RequestView, num_tokens: int) -> bool:
        """Whether a waiting request fits: a seat in the batch, and blocks for its hit plus `num_tokens`."""

    @abstractmethod
    def admit(self, view: RequestView, num_tokens: int) -> None:
        """Takes a waiting request into the running set (the caller has popped it from the policy) and schedules it."""

    def can_hold(self, view: RequestView) -> bool:
        """Whether the next full blocks that a waiting request lacks are just being computed for a running one, by steps that
        are built and not confirmed, and are enough to wait for: to admit it now would compute them twice; once they are
        confirmed it hits them."""
        return False

    def hold(self, view: RequestView) -> None:
        """Sets such a request aside (the caller has popped it from the policy). It is pushed into the policy again when the
        blocks are confirmed, or when it turns out that they will not come: within as many results as steps are in flight
        now. Until then it keeps one of the seats in `budget`."""
        raise PlanError(f"request {view.request_id} cannot be held back: this plan builder holds nobody")

    @abstractmethod
    def preemption_candidates(self, needy: RequestView | None) -> Sequence[RequestView]:
        """Running requests that may yield, in service order: not in this plan yet, not already yielding, not protected.

        needy: who lacks blocks (as `can_schedule` found); then only those behind it in service order are offered, and nobody
        while enough blocks come free at coming updates anyway: the needy one then skips this step. Asking on behalf of a needy
        request closes the step for admission.
        """

    @abstractmethod
    def preempt(self, view: RequestView) -> bool:
        """Takes a running request's blocks away. True: they are free now. False: it is in flight, so they come free at its
        update; blocks for this step must be found elsewhere or waited for."""

    @abstractmethod
    def is_scheduled(self, view: RequestView) -> bool:
        """Whether the request is in this plan."""

    @abstractmethod
    def build(self) -> StepPlan | None:
        """The finished plan; None when there is nothing to do. The builder cannot be used afterwards."""


class SchedulingMechanism(ABC):
    """The core's side of scheduling, as a scheduler plugin sees it."""

    @property
    @abstractmethod
    def running(self) -> Sequence[RequestView]:
        """Running requests in service order: best class first, then oldest. Live; copy before preempting or admitting."""

    @property
    @abstractmethod
    def pool(self) -> PoolView: ...

    @abstractmethod
    def begin_plan(self) -> PlanBuilder:
        """A builder for the next step. The previous one must have been built."""

    @abstractmethod
    def refuse(self, request_id: int, reason: str, status: int) -> None:
        """Ends a waiting request that the policy shed; it was removed from the policy's queue by the caller."""

    @abstractmethod
    def update(self, result: StepResult) -> list[RequestUpdate]:
        """Confirms a step: tokens in, stops checked, blocks hashed, finished and yielding requests released."""


class Scheduler(ABC):
    """Fills plans. Most schedulers implement `schedule` only.

    The engine may set `policy` and `victim` anew between two steps: read them from here, keep no reference of your own.
    """

    def __init__(self, mechanism: SchedulingMechanism, policy: Policy, victim: VictimRule) -> None:
        self.mechanism = mechanism
        self.policy = policy
        self.victim = victim

    @abstractmethod
    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run now (nothing waits, or everything is in flight)."""

    def update(self, result: StepResult) -> list[RequestUpdate]:
        """Confirms a step's result; called once per plan, in plan order."""
        return self.mechanism.update(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerContext(BuildContext):
    """The pieces to compose."""

    mechanism: SchedulingMechanism
    policy: Policy
    victim: VictimRule
