"""Schedulers with one fault each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ...contracts.plan import StepPlan
from ...contracts.policy import Policy, RequestView
from ...contracts.provider import Provider
from ...contracts.scheduler import PlanBuilder, Scheduler, SchedulerContext, SchedulingMechanism
from ...contracts.victim import VictimRule
from ..templates.scheduler import MyScheduler
from . import BrokenSample


class Overspends(MyScheduler):
    """Gives every request what it wants, whatever is left of the step."""

    def _tokens_for(self, plan: PlanBuilder, view: RequestView, wanted: int) -> int:
        return wanted

    def _has_blocks(self, plan: PlanBuilder, view: RequestView, num_tokens: int) -> bool:
        return plan.num_blocks_missing(view, num_tokens) == 0


class NeverAsksForBlocks(MyScheduler):
    """Schedules without asking whether blocks are there."""

    def _has_blocks(self, plan: PlanBuilder, view: RequestView, num_tokens: int) -> bool:
        return True


class SchedulesTwice(MyScheduler):
    """Puts a request into a plan twice."""

    def _has_blocks(self, plan: PlanBuilder, view: RequestView, num_tokens: int) -> bool:
        if super()._has_blocks(plan, view, num_tokens):
            plan.schedule(view, num_tokens)
            return True
        return False


class ServesTheLastOnly(MyScheduler):
    """Those before the last running request never get on while it runs."""

    def _has_blocks(self, plan: PlanBuilder, view: RequestView, num_tokens: int) -> bool:
        return view is self.mechanism.running[-1] and super()._has_blocks(plan, view, num_tokens)


class LosesItsPlan(MyScheduler):
    """Builds a plan and returns another answer."""

    def __init__(self, mechanism: SchedulingMechanism, policy: Policy, victim: VictimRule) -> None:
        super().__init__(mechanism, policy, victim)
        self._turn = 0

    def schedule(self) -> StepPlan | None:
        self._turn += 1
        plan = super().schedule()
        return None if self._turn % 3 == 0 else plan


class IgnoresShares(MyScheduler):
    """Does not ask the policy for a request's share."""

    def _tokens_for(self, plan: PlanBuilder, view: RequestView, wanted: int) -> int:
        granted = min(wanted, plan.budget.num_tokens)
        return granted if plan.chunked or granted == wanted else 0


class NeverSheds(MyScheduler):
    """Leaves in the queue whom the policy gave up on."""

    def _refuse_the_shed(self) -> None:
        self.policy.shed()


class AdmitsWhoeverFits(MyScheduler):
    """Takes the shortest waiting request past the policy: the long ones starve."""

    def _admit(self, plan: PlanBuilder) -> None:
        while plan.budget.num_tokens > 0 and plan.budget.num_requests > 0 and len(self.policy):
            view = min(self.policy.waiting(), key=lambda view: (view.num_prompt_tokens, view.request_id))
            num_tokens = self._tokens_for(plan, view, plan.num_tokens_to_admit(view))
            if num_tokens <= 0 or not plan.can_admit(view, num_tokens):
                return
            self.policy.remove(view.request_id)
            plan.admit(view, num_tokens)


class NeverHolds(MyScheduler):
    """Lets everybody compute the prefix that somebody is computing."""

    def _admit(self, plan: PlanBuilder) -> None:
        while plan.budget.num_tokens > 0 and plan.budget.num_requests > 0:
            view = self.policy.peek()
            if view is None:
                return
            num_tokens = self._tokens_for(plan, view, plan.num_tokens_to_admit(view))
            if num_tokens <= 0 or not plan.can_admit(view, num_tokens):
                return
            plan.admit(self.policy.pop(), num_tokens)


class KeepsItsPolicy(MyScheduler):
    """Asks the policy that it was made with, also after a swap."""

    def __init__(self, mechanism: SchedulingMechanism, policy: Policy, victim: VictimRule) -> None:
        super().__init__(mechanism, policy, victim)
        self._first_policy = policy

    def _admit(self, plan: PlanBuilder) -> None:
        current, self.policy = self.policy, self._first_policy
        super()._admit(plan)
        self.policy = current


class PicksItsOwnVictims(MyScheduler):
    """Preempts the last candidate whatever the rule says."""

    def _has_blocks(self, plan: PlanBuilder, view: RequestView, num_tokens: int) -> bool:
        while not plan.can_schedule(view, num_tokens):
            candidates = plan.preemption_candidates(view)
            if not candidates:
                return False
            plan.preempt(candidates[-1])
        return True


class LeavesPlansUnbuilt(MyScheduler):
    """Begins a plan and forgets it when nothing waits."""

    def schedule(self) -> StepPlan | None:
        if not len(self.policy) and not self.mechanism.running:
            self.mechanism.begin_plan()
            return None
        return super().schedule()


def _sample(name: str, make: Callable[[Any, Any, Any], Scheduler], caught_by: str) -> BrokenSample:
    def build(context: SchedulerContext) -> Scheduler:
        return make(context.mechanism, context.policy, context.victim)

    provider: Provider[Scheduler] = Provider(name=name, build=build, summary=f"broken: {name.replace('_', ' ')}")
    return BrokenSample(name, provider, caught_by)


BROKEN: Final[tuple[BrokenSample, ...]] = (
    _sample("overspends", Overspends, "serves_through_the_mechanism"),
    _sample("never_asks_for_blocks", NeverAsksForBlocks, "serves_through_the_mechanism"),
    _sample("schedules_twice", SchedulesTwice, "serves_one_request"),
    _sample("serves_the_last_only", ServesTheLastOnly, "serves_through_the_mechanism"),
    _sample("loses_its_plan", LosesItsPlan, "returns_the_plan_that_it_built"),
    _sample("ignores_shares", IgnoresShares, "respects_the_policys_share"),
    _sample("never_sheds", NeverSheds, "refuses_whom_the_policy_sheds"),
    _sample("admits_whoever_fits", AdmitsWhoeverFits, "nobody_waits_for_ever"),
    _sample("never_holds", NeverHolds, "computes_shared_prefixes_once"),
    _sample("keeps_its_policy", KeepsItsPolicy, "uses_the_policy_that_was_swapped_in"),
    _sample("picks_its_own_victims", PicksItsOwnVictims, "preempts_whom_the_victim_rule_names"),
    _sample("leaves_plans_unbuilt", LeavesPlansUnbuilt, "gives_none_when_nothing_waits"),
)
