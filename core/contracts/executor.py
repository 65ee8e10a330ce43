"""Kind `executor`: carries plans to workers and results back. Engine process; called from the scheduling thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .plan import StepPlan, StepResult
from .provider import BuildContext


class Worker(ABC):
    """One device's side of a step; made by the core (core/runner). All methods are called on one thread."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> None:
        """Applies the plan's deltas and runs the forward; leaves the rows to sample on the device."""

    @abstractmethod
    def sample(self, plan: StepPlan, masks: Any | None) -> StepResult:
        """Draws the tokens of the step executed last and gives the result."""

    def launch_sample(self, plan: StepPlan, masks: Any | None) -> Callable[[], StepResult]:
        """As `sample`, for devices that work asynchronously: queues the draw and returns at once. The callable waits for
        the device and gives the result; call it once, in plan order."""
        result = self.sample(plan, masks)
        return lambda: result

    @abstractmethod
    def collective(self, method: str, *args: Any) -> Any:
        """Runs a named administrative method (reset, memory report) on the worker."""

    @abstractmethod
    def shutdown(self) -> None:
        """Frees the device."""


class Executor(ABC):
    """At most `max_steps_in_flight` plans are between `execute` and `next_result` at a time; results come in plan order."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> None:
        """Starts the forward; returns at once."""

    @abstractmethod
    def sample(self, plan: StepPlan, masks: Any | None) -> None:
        """Queues the sampling of that step; `masks` were built while the forward ran."""

    @abstractmethod
    def next_result(self) -> StepResult:
        """Blocks until the oldest step in flight is done. Raises what the worker raised."""

    @abstractmethod
    def collective(self, method: str, *args: Any) -> list[Any]:
        """Runs a named method on every worker, after the steps in flight, and returns their answers by rank."""

    @abstractmethod
    def check_health(self) -> None:
        """Raises EngineDeadError when a worker is gone."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers; idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorContext(BuildContext):
    """make_worker: builds this process's worker when called on the thread that will run it."""

    make_worker: Callable[[], Worker]
