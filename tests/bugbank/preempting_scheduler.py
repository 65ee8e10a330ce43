"""A scheduler plugin that preempts for no reason: loaded by tests of group E with `--plugin FILE,after=TOKENS`."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.plan import StepPlan
from hotswap.core.contracts.provider import Provider
from hotswap.core.contracts.scheduler import Scheduler, SchedulerContext
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching


class Options(BaseModel):
    """after: computed tokens. The first request in service order is protected by the core and never yields."""

    model_config = ConfigDict(extra="forbid")

    after: int


class Preempting(ContinuousBatching):
    after = 0

    def schedule(self) -> StepPlan | None:
        plan = self.mechanism.begin_plan()
        for view in list(plan.preemption_candidates(None)):
            if view.request_id not in self._yielded and view.num_computed_tokens >= self.after:
                self._yielded.add(view.request_id)
                plan.preempt(view)
        for view in tuple(self.mechanism.running):
            wanted = plan.num_tokens_wanted(view)
            if plan.budget.num_tokens and wanted > 0:
                num_tokens = self._share(plan, view, wanted)
                if num_tokens > 0 and self._make_room(plan, view, num_tokens):
                    plan.schedule(view, num_tokens)
        self._admit(plan)
        return plan.build()

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context.mechanism, context.policy, context.victim)
        self._yielded: set[int] = set()
        if isinstance(context.options, Options):
            self.after = context.options.after


@hookimpl
def hotswap_scheduler() -> Iterator[Provider[Scheduler]]:
    yield Provider(name="preempting", build=Preempting, options=Options, summary="preempts each request once")
