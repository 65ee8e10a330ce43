"""Scheduler `continuous_batching`: those that run go first, in service order; the policy fills what is left of the
step.
"""

from __future__ import annotations

from collections.abc import Iterator

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.plan import StepPlan
from hotswap.core.contracts.policy import Policy, RequestView
from hotswap.core.contracts.provider import Provider
from hotswap.core.contracts.scheduler import PlanBuilder, Scheduler, SchedulerContext


class ContinuousBatching(Scheduler):
    """Requests join and leave the batch at any step. When blocks run out the victim rule says who behind the needy one
    yields; with nobody left, the needy one skips the step.
    """

    def schedule(self) -> StepPlan | None:
        plan = self.mechanism.begin_plan()
        self._shed()
        budget = plan.budget
        settled = plan.schedule_decodes() if type(self.policy).share is Policy.share else 0
        for view in self.mechanism.running[settled:]:
            if budget.num_tokens == 0:
                break
            wanted = plan.num_tokens_wanted(view)
            if wanted > 0:
                num_tokens = self._share(plan, view, wanted)
                if num_tokens > 0 and (plan.can_schedule(view, num_tokens) or self._make_room(plan, view, num_tokens)):
                    plan.schedule(view, num_tokens)
        self._admit(plan)
        return plan.build()

    def _share(self, plan: PlanBuilder, view: RequestView, wanted: int) -> int:
        """Tokens for this request in this step: what it wants, its share, what is left; 0 when that is less than it can
        use.
        """
        budget = plan.budget
        share = self.policy.share(view, budget)
        if wanted <= share and wanted <= budget.num_tokens:
            return wanted
        return min(share, budget.num_tokens) if plan.chunked else 0

    def _make_room(self, plan: PlanBuilder, view: RequestView, num_tokens: int) -> bool:
        while not plan.can_schedule(view, num_tokens):
            candidates = plan.preemption_candidates(view)
            if not candidates:
                return False
            plan.preempt(self.victim.choose(candidates, plan.num_blocks_missing(view, num_tokens)))
        return True

    def _admit(self, plan: PlanBuilder) -> None:
        """Strictly in the policy's order: whoever does not fit keeps those behind it waiting, so that nobody is passed
        for ever. Only whoever shares blocks in flight is set aside until they are computed.
        """
        while plan.budget.num_tokens and plan.budget.num_requests:
            view = self.policy.peek()
            if view is None:
                return
            if plan.can_hold(view):
                self._pop(view)
                plan.hold(view)
                continue
            num_tokens = self._share(plan, view, plan.num_tokens_to_admit(view))
            if num_tokens <= 0 or not plan.can_admit(view, num_tokens):
                return
            self._pop(view)
            plan.admit(view, num_tokens)

    def _pop(self, view: RequestView) -> None:
        if self.policy.pop() is not view:
            raise RuntimeError(f"policy {type(self.policy).__name__}: pop took another request than peek had shown")

    def _shed(self) -> None:
        for shed in list(self.policy.shed()):
            self.policy.remove(shed.request_id)
            self.mechanism.refuse(shed.request_id, shed.reason, shed.status)


@hookimpl
def hotswap_scheduler() -> Iterator[Provider[Scheduler]]:
    def build(context: SchedulerContext) -> Scheduler:
        return ContinuousBatching(context.mechanism, context.policy, context.victim)

    yield Provider(
        name="continuous_batching", build=build, priority=10, summary="requests join and leave the batch at any step"
    )
