"""Executor `my_executor`: one worker on one thread of this process; jobs go in through one queue, results come out of
another.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from hotswap.core.contracts import (
    EngineDeadError,
    Executor,
    ExecutorContext,
    Provider,
    StepPlan,
    StepResult,
    Worker,
    hookimpl,
)

SHUTDOWN_SECONDS = 10.0

Job = Callable[[Worker], Any]


class MyExecutor(Executor):
    """Every job answers through the queue that came with it: (its answer, None), or (None, what it raised).

    A fault in a step ends the worker: every step after it would compute on what the fault left behind.
    """

    def __init__(self, make_worker: Callable[[], Worker]) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, queue.SimpleQueue[Any], bool] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._fault: BaseException | None = None
        ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(make_worker, ready), name="my_executor", daemon=True)
        self._thread.start()
        _answer(ready)

    def execute(self, plan: StepPlan) -> None:
        self._jobs.put((lambda worker: worker.execute(plan), queue.SimpleQueue(), True))

    def sample(self, plan: StepPlan, masks: Any | None) -> None:
        self._jobs.put((lambda worker: worker.sample(plan, masks), self._results, True))

    def next_result(self) -> StepResult:
        result: StepResult = _answer(self._results)
        return result

    def collective(self, method: str, *args: Any) -> list[Any]:
        self.check_health()
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs.put((lambda worker: worker.collective(method, *args), answers, False))
        return [_answer(answers)]

    def check_health(self) -> None:
        if self._fault is not None:
            raise EngineDeadError(f"the worker failed: {type(self._fault).__name__}: {self._fault}") from self._fault
        if not self._thread.is_alive():
            raise EngineDeadError("the worker thread has ended")

    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join(SHUTDOWN_SECONDS)

    def _run(self, make_worker: Callable[[], Worker], ready: queue.SimpleQueue[Any]) -> None:
        """The worker's thread: it is made, used and shut down here, as devices belong to a thread."""
        try:
            worker = make_worker()
        except BaseException as error:  # noqa: BLE001 - the constructor waits for it
            ready.put((None, error))
            return
        ready.put((None, None))
        while (item := self._jobs.get()) is not None:
            job, answers, is_step = item
            fault = self._fault if is_step else None
            answer = None
            if fault is None:
                try:
                    answer = job(worker)
                except BaseException as error:  # noqa: BLE001 - raised where somebody waits for it
                    fault = error
                    if is_step:
                        self._fault = error
            answers.put((answer, fault))
        worker.shutdown()


def _answer(answers: queue.SimpleQueue[Any]) -> Any:
    answer, error = answers.get()
    if error is not None:
        raise error
    return answer


def _unavailable(context: ExecutorContext) -> list[str]:
    return [f"it runs one worker, {context.world_size} are asked for"] if context.world_size > 1 else []


@hookimpl
def hotswap_executor() -> Iterator[Provider[Executor]]:
    yield Provider(
        name="my_executor",
        build=lambda context: MyExecutor(context.make_worker),
        unavailable=_unavailable,
        summary="one worker on a thread of the engine process",
    )
