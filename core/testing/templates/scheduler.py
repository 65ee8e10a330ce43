"""Scheduler `my_scheduler`: running requests in service order first, then the policy's next ones, one plan a step."""

from __future__ import annotations

from collections.abc import Iterator

from hotswap.core.contracts import PlanBuilder, Provider, RequestView, Scheduler, SchedulerContext, StepPlan, hookimpl


class MyScheduler(Scheduler):
    """Plain continuous batching. The builder refuses what must not be; a scheduler only asks in the right order."""

    def schedule(self) -> StepPlan | None:
        plan = self.mechanism.begin_plan()
        self._refuse_the_shed()
        for view in tuple(self.mechanism.running):  # a copy: preempting changes it
            num_tokens = self._tokens_for(plan, view, plan.num_tokens_wanted(view))
            if num_tokens > 0 and self._has_blocks(plan, view, num_tokens):
                plan.schedule(view, num_tokens)
        self._admit(plan)
        return plan.build()  # always: a plan that was begun must be built

    def _tokens_for(self, plan: PlanBuilder, view: RequestView, wanted: int) -> int:
        """What it wants, within its share and the step's budget; nothing when it cannot be cut and does not fit."""
        granted = min(wanted, self.policy.share(view, plan.budget), plan.budget.num_tokens)
        return granted if plan.chunked or granted == wanted else 0

    def _has_blocks(self, plan: PlanBuilder, view: RequestView, num_tokens: int) -> bool:
        """Preempts behind `view` until its blocks are there, or nobody may yield: then it skips this step."""
        while not plan.can_schedule(view, num_tokens):
            candidates = plan.preemption_candidates(view)
            if not candidates:
                return False
            plan.preempt(self.victim.choose(candidates, plan.num_blocks_missing(view, num_tokens)))
        return True

    def _admit(self, plan: PlanBuilder) -> None:
        """In the policy's order. The first that does not fit ends it: to let others pass would starve it."""
        while plan.budget.num_tokens > 0 and plan.budget.num_requests > 0:
            view = self.policy.peek()
            if view is None:
                return
            if plan.can_hold(view):  # somebody is computing its next blocks: it need not do so again
                plan.hold(self.policy.pop())
                continue
            num_tokens = self._tokens_for(plan, view, plan.num_tokens_to_admit(view))
            if num_tokens <= 0 or not plan.can_admit(view, num_tokens):
                return
            plan.admit(self.policy.pop(), num_tokens)

    def _refuse_the_shed(self) -> None:
        for shed in list(self.policy.shed()):
            self.policy.remove(shed.request_id)
            self.mechanism.refuse(shed.request_id, shed.reason, shed.status)


@hookimpl
def hotswap_scheduler() -> Iterator[Provider[Scheduler]]:
    def build(context: SchedulerContext) -> MyScheduler:
        return MyScheduler(context.mechanism, context.policy, context.victim)

    yield Provider(name="my_scheduler", build=build, summary="running requests first, then the policy's order")
