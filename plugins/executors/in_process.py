"""Executor `in_process`: one worker on one thread of the engine process. torch releases the GIL, so planning
overlaps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from hotswap.core.contracts import EngineDeadError
from hotswap.core.contracts.executor import Executor, ExecutorContext, Worker
from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.plan import StepPlan, StepResult
from hotswap.core.contracts.provider import Provider

SHUTDOWN_SECONDS = 10.0

_Job = Callable[[Worker], None]


class InProcessExecutor(Executor):
    """Jobs run on one thread in the order in which they were given, so results come in plan order.

    A fault is kept: `next_result` raises it for the step that met it and for every later one, and no further job runs.
    """

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        """Builds the worker on its thread and waits for it. Raises what `make_worker` raises."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | None] = queue.SimpleQueue()  # None: see self._fault
        self._fault: BaseException | None = None
        self._num_in_flight = 0  # steps whose sampling was asked for; the caller's side only
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_worker, ready), name="hotswap-worker", daemon=True)
        self._thread.start()
        ready.result()

    def execute(self, plan: StepPlan) -> None:
        self._submit(lambda worker: worker.execute(plan))

    def sample(self, plan: StepPlan, masks: Any | None) -> None:
        self._num_in_flight += 1
        self._submit(lambda worker: self._results.put(worker.sample(plan, masks)))

    def next_result(self) -> StepResult:
        if self._num_in_flight == 0:
            raise RuntimeError("no step is in flight: next_result() would wait for ever")
        if self._fault is not None and self._results.empty():
            raise self._fault
        result = self._results.get()
        if result is None:
            raise self._fault or EngineDeadError("the worker thread ended")
        self._num_in_flight -= 1
        return result

    def collective(self, method: str, *args: Any) -> list[Any]:
        answer: Future[Any] = Future()

        def call(worker: Worker) -> None:
            try:
                answer.set_result(worker.collective(method, *args))
            except Exception as error:  # noqa: BLE001 - the caller's to judge; the worker has served no step and goes on
                answer.set_exception(error)

        self.check_health()
        self._submit(call)
        while not answer.done():
            try:
                answer.exception(timeout=0.1)
            except TimeoutError:
                self.check_health()
        return [answer.result()]

    def check_health(self) -> None:
        if self._fault is not None:
            raise EngineDeadError(f"the worker failed: {type(self._fault).__name__}: {self._fault}") from self._fault
        if not self._thread.is_alive():
            raise EngineDeadError("the worker thread has ended")

    def shutdown(self) -> None:
        """Waits for the step that runs now; queued ones are dropped."""
        if not self._thread.is_alive():
            return
        while True:
            try:
                self._jobs.get_nowait()
            except queue.Empty:
                break
        self._submit(None)
        self._thread.join(SHUTDOWN_SECONDS)

    def _submit(self, job: _Job | None) -> None:
        self._jobs.put(job)

    def _run(self, make_worker: Callable[[], Worker], ready: Future[None]) -> None:
        try:
            worker = make_worker()
        except BaseException as error:  # noqa: BLE001 - whatever it was, the constructor waits for it
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while (job := self._jobs.get()) is not None:
                job(worker)
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits for results
            self._fault = error
            self._results.put(None)
        finally:
            worker.shutdown()


def _build(context: ExecutorContext) -> Executor:
    return InProcessExecutor(context.make_worker)


def _unavailable(context: ExecutorContext) -> list[str]:
    if context.world_size > 1:
        return [f"it runs one worker, {context.world_size} are asked for"]
    return []


@hookimpl
def hotswap_executor() -> Iterator[Provider[Executor]]:
    yield Provider(
        name="in_process",
        build=_build,
        unavailable=_unavailable,
        priority=10,
        summary="One worker on a thread of the engine process.",
    )
