"""The executor of a simulation: a step takes what the cost model says, and draws what the trace says."""

from __future__ import annotations

from collections import deque
from typing import Any

from ..clock import ManualClock
from ..contracts.executor import Executor
from ..contracts.plan import RowResult, StepPlan, StepResult
from .step_cost import StepCost, work_of

END_TOKEN = 0  # drawn where the trace says that an answer ends


class SimulatedExecutor(Executor):
    """Steps run one after the other, as on one device: each begins when it is queued or when the one before is done,
    whichever is later. Waiting for a result moves the clock to its end.

    busy_seconds: that steps took. num_steps, num_tokens: that were run.
    """

    def __init__(self, clock: ManualClock, cost: StepCost) -> None:
        self.busy_seconds = 0.0
        self.num_steps = 0
        self.num_tokens = 0
        self._clock = clock
        self._cost = cost
        self._free_at = clock.now()
        self._in_flight: deque[tuple[float, StepResult]] = deque()
        # By request: a row without a token, one with the request's own, one with the last, and the place of the last in the
        # sequence of prompt and answer. Rows are the same objects in every step: nobody changes them.
        self._draws: dict[int, tuple[RowResult, RowResult, RowResult, int]] = {}

    def expect(self, request_id: int, token: int, prompt_tokens: int, output_tokens: int) -> None:
        """What a request will draw: `token` again and again, END_TOKEN at its `output_tokens`-th draw."""
        self._draws[request_id] = (
            RowResult(request_id, []),
            RowResult(request_id, [token]),
            RowResult(request_id, [END_TOKEN]),
            prompt_tokens + output_tokens - 1,
        )

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        del self._draws[request_id]

    def execute(self, plan: StepPlan) -> None:
        seconds = self._cost.seconds(work_of(plan))
        begin = max(self._clock.now(), self._free_at)
        self._free_at = begin + seconds
        self.busy_seconds += seconds
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        draws, rows = self._draws, []
        for row in plan.scheduled:
            nothing, token, last, last_place = draws[row.request_id]
            if not row.samples:
                rows.append(nothing)
            elif row.num_scheduled_tokens_before + row.num_tokens < last_place:
                rows.append(token)
            else:
                rows.append(last)
        self._in_flight.append((self._free_at, StepResult(plan.step_id, rows, seconds)))

    def sample(self, plan: StepPlan, masks: Any | None) -> None:
        """Drawn with the step."""

    def next_result(self) -> StepResult:
        end, result = self._in_flight.popleft()
        self._clock.advance_to(end)
        return result

    def collective(self, method: str, *args: Any) -> list[Any]:
        raise NotImplementedError(f"a simulated executor knows no method {method!r}")

    def check_health(self) -> None:
        """Always well."""

    def shutdown(self) -> None:
        self._in_flight.clear()
