"""Executors with one fault each."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Final

from ...contracts.executor import Executor, ExecutorContext, Worker
from ...contracts.plan import StepPlan, StepResult
from ...contracts.provider import Provider
from ..templates.executor import MyExecutor
from . import BrokenSample


class Synchronous(Executor):
    """Computes in `execute`: nothing can be planned meanwhile."""

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        self._worker = make_worker()
        self._results: list[StepResult] = []

    def execute(self, plan: StepPlan) -> None:
        self._worker.execute(plan)

    def sample(self, plan: StepPlan, masks: Any | None) -> None:
        self._results.append(self._worker.sample(plan, masks))

    def next_result(self) -> StepResult:
        return self._results.pop(0)

    def collective(self, method: str, *args: Any) -> list[Any]:
        return [self._worker.collective(method, *args)]

    def check_health(self) -> None:
        """Says nothing."""

    def shutdown(self) -> None:
        self._worker.shutdown()


class LatestFirst(MyExecutor):
    """Gives the latest result that is there."""

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        super().__init__(make_worker)
        self._results = queue.LifoQueue()  # type: ignore[assignment]

    def next_result(self) -> StepResult:
        self.collective("wait")
        return super().next_result()


class SwallowsFaults(MyExecutor):
    """Answers a step that failed with an empty result."""

    def next_result(self) -> StepResult:
        try:
            return super().next_result()
        except Exception:  # noqa: BLE001 - this is the fault
            return StepResult(-1, [])


class AlwaysWell(MyExecutor):
    """Looks at nothing."""

    def check_health(self) -> None:
        """Says nothing."""


class _KeepsTheWorker(MyExecutor):
    """Has the worker at hand on the caller's thread."""

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        made: list[Worker] = []

        def keep() -> Worker:
            made.append(make_worker())
            return made[0]

        super().__init__(keep)
        self._worker = made[0]


class CollectiveOutOfTurn(_KeepsTheWorker):
    """Runs methods on the caller's thread, beside the steps."""

    def collective(self, method: str, *args: Any) -> list[Any]:
        return [self._worker.collective(method, *args)]


class DropsMasks(MyExecutor):
    """Samples without the masks."""

    def sample(self, plan: StepPlan, masks: Any | None) -> None:
        super().sample(plan, None)


class ShutsDownAgain(_KeepsTheWorker):
    """Shuts the worker down at each call, and on the caller's thread."""

    def shutdown(self) -> None:
        super().shutdown()
        self._worker.shutdown()


class LeavesAThread(MyExecutor):
    """Ends the worker and forgets its own helper."""

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        super().__init__(make_worker)
        forever = threading.Event()
        threading.Thread(target=forever.wait, args=(30,), name="forgotten", daemon=True).start()


def _sample(name: str, make: Callable[[Callable[[], Worker]], Executor], caught_by: str) -> BrokenSample:
    def build(context: ExecutorContext) -> Executor:
        return make(context.make_worker)

    provider: Provider[Executor] = Provider(name=name, build=build, summary=f"broken: {name.replace('_', ' ')}")
    return BrokenSample(name, provider, caught_by)


BROKEN: Final[tuple[BrokenSample, ...]] = (
    _sample("synchronous", Synchronous, "execute_and_sample_return_at_once"),
    _sample("latest_first", LatestFirst, "results_come_in_plan_order"),
    _sample("swallows_faults", SwallowsFaults, "worker_faults_come_through_next_result"),
    _sample("always_well", AlwaysWell, "health_after_a_fault"),
    _sample("collective_out_of_turn", CollectiveOutOfTurn, "worker_is_used_on_one_thread"),
    _sample("drops_masks", DropsMasks, "masks_reach_the_worker"),
    _sample("shuts_down_again", ShutsDownAgain, "shutdown_is_idempotent"),
    _sample("leaves_a_thread", LeavesAThread, "shutdown_with_steps_in_flight"),
)
