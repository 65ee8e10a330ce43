"""Executor `inline`: one worker on the scheduling thread, for devices that work asynchronously. Nothing is handed from thread
to thread: while the device computes a step, this thread has queued it and plans the next.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from hotswap.core.contracts import EngineDeadError
from hotswap.core.contracts.executor import Executor, ExecutorContext, Worker
from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.plan import StepPlan, StepResult
from hotswap.core.contracts.provider import Provider

_Wait = Callable[[], StepResult]


class InlineExecutor(Executor):
    """A fault is kept: `next_result` raises it for the step that met it and for every later one, and the worker is given no
    further step. Steps that were queued before still give their results.
    """

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        """Raises what `make_worker` raises."""
        self._worker: Worker | None = make_worker()
        self._waits: deque[_Wait | None] = deque()  # the steps in flight, oldest first; None: see self._fault
        self._fault: Exception | None = None

    def execute(self, plan: StepPlan) -> None:
        worker = self._usable_worker()
        if worker is not None:
            try:
                worker.execute(plan)
            except Exception as error:  # noqa: BLE001 - raised by next_result, when this step's turn comes
                self._fault = error

    def sample(self, plan: StepPlan, masks: Any | None) -> None:
        wait: _Wait | None = None
        worker = self._usable_worker()
        if worker is not None:
            try:
                wait = worker.launch_sample(plan, masks)
            except Exception as error:  # noqa: BLE001 - raised by next_result, when this step's turn comes
                self._fault = error
        self._waits.append(wait)

    def next_result(self) -> StepResult:
        if not self._waits:
            raise self._fault or RuntimeError("no step is in flight: next_result() has nothing to wait for")
        try:
            return self._finish(0)
        finally:
            self._waits.popleft()

    def collective(self, method: str, *args: Any) -> list[Any]:
        """Waits for the steps in flight first; their results stay in line."""
        for place in range(len(self._waits)):
            if self._fault is None:
                with contextlib.suppress(Exception):  # next_result raises it; here the worker's end is told below
                    self._waits[place] = _ready(self._finish(place))
        self.check_health()
        worker = self._usable_worker()
        return [] if worker is None else [worker.collective(method, *args)]

    def check_health(self) -> None:
        if self._fault is not None:
            raise EngineDeadError(f"the worker failed: {type(self._fault).__name__}: {self._fault}") from self._fault
        if self._worker is None:
            raise EngineDeadError("the worker has been shut down")

    def shutdown(self) -> None:
        """Steps in flight are dropped; the worker waits for its device."""
        worker, self._worker = self._worker, None
        self._waits.clear()
        if worker is not None:
            worker.shutdown()

    def _usable_worker(self) -> Worker | None:
        return self._worker if self._fault is None else None

    def _finish(self, place: int) -> StepResult:
        """Waits for a step in flight. The device may report a fault only now; then nothing queued behind it can be believed."""
        wait = self._waits[place]
        try:
            if wait is None:
                raise self._fault or EngineDeadError("the worker has been shut down")
            return wait()
        except Exception as error:
            self._fault = error
            for later in range(place, len(self._waits)):
                self._waits[later] = None
            raise


def _ready(result: StepResult) -> _Wait:
    return lambda: result


def _build(context: ExecutorContext) -> Executor:
    return InlineExecutor(context.make_worker)


def _unavailable(context: ExecutorContext) -> list[str]:
    reasons = []
    if context.device.kind in ("cpu", "host"):
        reasons.append("a processor computes when it is called: nothing could be planned meanwhile; use in_process")
    if context.world_size > 1:
        reasons.append(f"it runs one worker, {context.world_size} are asked for")
    return reasons


@hookimpl
def hotswap_executor() -> Iterator[Provider[Executor]]:
    yield Provider(
        name="inline",
        build=_build,
        unavailable=_unavailable,
        priority=20,
        summary="One worker on the scheduling thread, for devices that work asynchronously.",
    )
