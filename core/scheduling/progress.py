"""A step of the core's own: progress is guaranteed, whatever scheduler and policy say."""

from __future__ import annotations

from ..contracts.plan import StepPlan
from .mechanism import Mechanism
from .plan_builder import StepPlanBuilder


def force_progress(mechanism: Mechanism) -> StepPlan | None:
    """One token of the first running request in service order, or of the one to admit when nobody runs (whole prompts
    where they are not split). For when nothing is in flight and the scheduler plans nothing. None: not even that fits.
    """
    plan = mechanism.begin_plan()
    if not _run_first(mechanism, plan) and not mechanism.num_running:
        _admit_one(mechanism, plan)
    return plan.build()


def _run_first(mechanism: Mechanism, plan: StepPlanBuilder) -> bool:
    for view in tuple(mechanism.running):
        wanted = plan.num_tokens_wanted(view)
        if wanted > 0:
            count = 1 if plan.chunked else wanted
            while not plan.can_schedule(view, count):
                candidates = plan.preemption_candidates(view)
                if not candidates:
                    return False
                plan.preempt(candidates[-1])
            plan.schedule(view, count)
            return True
    return False


def _admit_one(mechanism: Mechanism, plan: StepPlanBuilder) -> None:
    view = mechanism.policy.peek() or mechanism.next_waiting()
    if view is None:
        return
    wanted = plan.num_tokens_to_admit(view)
    count = 1 if plan.chunked else wanted
    if plan.can_admit(view, count):
        mechanism.policy.remove(view.request_id)
        plan.admit(view, count)
