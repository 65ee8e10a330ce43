"""Policy `mlfq`: skip-join multi-level feedback queue. Short requests pass long ones without anybody knowing lengths.

After Wu et al., "Fast Distributed Inference Serving for Large Language Models" (FastServe), arXiv 2305.05920. Levels have
quanta that double. A request joins the first level whose quantum covers its prefill, goes a level down whenever it has used its
quantum, and back to the top once it has waited too long.

What differs from the paper, where a better request takes a running one's place at once and the KV cache is swapped out ahead of
time: here nobody who runs is stopped. The contract gives a policy the order of those that wait and a share of the step for each
that runs; the core preempts only when memory is short, and asks a victim rule whom. So
- levels decide who is admitted next, a preempted request at the level it has sunk to;
- of those that run only a long prompt gives way: while a request of a better level could be admitted, it leaves that one up to
  half of what is left of the step, instead of filling step after step until it is computed;
- a decoding request is never slowed down. A share of 0 would make it skip a step, but it would keep its seat and its blocks,
  and the step would hardly be shorter: nobody would gain.
Service is counted in tokens, not seconds: the same trace gives the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.policy import Budget, PolicyContext, PolicyProvider, RequestView

from .queued import PatientPolicy


class MlfqOptions(BaseModel):
    """What may follow `--plugin policy=mlfq,`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    quantum: float = Field(
        default=64.0,
        gt=0,
        allow_inf_nan=False,
        description="Service on the first level, in output tokens; each further level has twice as much.",
    )
    levels: int = Field(default=8, ge=1, le=32, description="How many levels there are; on the last nobody sinks.")
    prompt_weight: float = Field(
        default=0.2,
        ge=0,
        allow_inf_nan=False,
        description="The service that computing a prompt token is, where an output token is 1.",
    )
    promote_after_seconds: float = Field(
        default=10.0,
        gt=0,
        allow_inf_nan=False,
        description="Whoever has waited so long is served next, and starts again on the first level.",
    )


@dataclass(slots=True)
class _Service:
    """level: 0 is the best. used: of that level's quantum, in output tokens."""

    level: int
    used: float = 0.0


class Mlfq(PatientPolicy[tuple[int, float]]):
    """By level, then by arrival. Service is counted from a request's first push, or first step here, until it ends."""

    def __init__(self, options: MlfqOptions, clock: Callable[[], float]) -> None:
        super().__init__(clock, options.promote_after_seconds)
        self._quanta = [options.quantum * 2**level for level in range(options.levels)]
        self._prompt_weight = options.prompt_weight
        self._services: dict[int, _Service] = {}
        self._made_room_for: int | None = None
        self._did_not_fit: int | None = None

    def key(self, view: RequestView) -> tuple[int, float]:
        return self._service(view).level, view.arrival_time

    def waits_since(self, view: RequestView) -> float:
        return self._now if view.num_preemptions else view.arrival_time

    def level(self, view: RequestView) -> int:
        """The level that a request is on; one that has waited too long is on the first."""
        return 0 if view is self.overdue() else self._service(view).level

    def pop(self) -> RequestView:
        promoted = self.overdue()
        view = super().pop()
        if view is promoted:
            self._services[view.request_id] = _Service(0)
        return view

    def reorder(self) -> None:
        # Room that nobody took is not made for the same request again: it lacks blocks, and steps would stay half empty.
        kept = self._made_room_for
        self._did_not_fit = kept if kept is not None and kept in self._queue else None

    def share(self, view: RequestView, budget: Budget) -> int:
        left = budget.num_tokens
        if view.num_scheduled_tokens >= view.num_prompt_tokens or not budget.num_requests:
            return left  # it decodes, or nobody could join it
        first = self.peek()
        if first is None or view.request_id in self._queue or first.request_id == self._did_not_fit:
            return left
        if self.level(first) >= self._service(view).level:
            return left
        self._made_room_for = first.request_id
        return max(1, left - min(_num_to_compute(first), left // 2))

    def on_scheduled(self, view: RequestView, num_tokens: int) -> None:
        service = self._service(view)
        service.used += 1.0 if num_tokens == 1 else self._prompt_weight * num_tokens
        quanta = self._quanta
        while service.used > quanta[service.level] and service.level + 1 < len(quanta):
            service.used -= quanta[service.level]
            service.level += 1

    def on_finish(self, view: RequestView) -> None:
        self._services.pop(view.request_id, None)

    def _service(self, view: RequestView) -> _Service:
        service = self._services.get(view.request_id)
        if service is None:
            prefill = self._prompt_weight * _num_to_compute(view)
            fits = (level for level, quantum in enumerate(self._quanta) if prefill <= quantum)
            service = self._services[view.request_id] = _Service(next(fits, len(self._quanta) - 1))
        return service


def _num_to_compute(view: RequestView) -> int:
    """Tokens before a waiting request's next output."""
    return view.num_prompt_tokens + view.num_output_tokens - view.num_cached_prompt_tokens


@hookimpl
def hotswap_policy() -> Iterator[PolicyProvider]:
    def build(context: PolicyContext) -> Mlfq:
        options = context.options if isinstance(context.options, MlfqOptions) else MlfqOptions()
        return Mlfq(options, context.clock.now)

    yield PolicyProvider(
        name="mlfq",
        build=build,
        options=MlfqOptions,
        summary="levels with doubling quanta: whoever has had much service waits behind whoever had little",
    )
