"""Conformance of kind `executor`, with a worker that does as it is told instead of a model."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from ...contracts.executor import Executor, Worker
from ...contracts.plan import RowResult, ScheduledRequest, StepPlan, StepResult
from ...errors import EngineDeadError, PluginError
from .base import ConformanceSuite

HOLD_SECONDS = 1.0  # how long a held worker waits before it goes on by itself, so that a fault cannot hang the run


class WorkerFault(RuntimeError):
    """What the scripted worker raises."""


def plan(step_id: int) -> StepPlan:
    """A step of one request with one token."""
    return StepPlan(step_id, [], [], [ScheduledRequest(step_id, 1, step_id, True)], 1)


class ScriptedWorker(Worker):
    """Keeps what was asked of it, in order, with the thread that asked.

    fail_execute, fail_sample: ids of steps that fail there. gate: while it is not set, `execute` waits.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[int] = {threading.get_ident()}
        self.fail_execute: set[int] = set()
        self.fail_sample: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.num_shutdowns = 0
        self._executed: StepPlan | None = None

    def execute(self, plan: StepPlan) -> None:
        self._note("execute", plan.step_id)
        self.gate.wait(HOLD_SECONDS)
        self._note("executed", plan.step_id)
        if plan.step_id in self.fail_execute:
            raise WorkerFault(f"step {plan.step_id} fails in execute")
        self._executed = plan

    def sample(self, plan: StepPlan, masks: Any | None) -> StepResult:
        self._note("sample", (plan.step_id, masks))
        if self._executed is None or self._executed.step_id != plan.step_id:
            raise WorkerFault(f"step {plan.step_id} is sampled, but was not the last to be executed")
        if plan.step_id in self.fail_sample:
            raise WorkerFault(f"step {plan.step_id} fails in sample")
        return StepResult(plan.step_id, [RowResult(row.request_id, [plan.step_id]) for row in plan.scheduled])

    def collective(self, method: str, *args: Any) -> Any:
        self._note("collective", (method, args))
        if method == "fail":
            raise WorkerFault("the method fails")
        return (method, args)

    def shutdown(self) -> None:
        self._note("shutdown", None)
        self.num_shutdowns += 1

    def names(self, *wanted: str) -> list[tuple[str, Any]]:
        return [call for call in self.calls if call[0] in wanted]

    def _note(self, name: str, what: Any) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append((name, what))


class QueuingWorker(ScriptedWorker):
    """The same on a device that works asynchronously: `execute` queues; what `launch_sample` gives waits at the gate.

    fail_late: ids of steps whose fault the device reports only when it is waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fail_late: set[int] = set()

    def execute(self, plan: StepPlan) -> None:
        self._note("execute", plan.step_id)
        if plan.step_id in self.fail_execute:
            raise WorkerFault(f"step {plan.step_id} fails in execute")
        self._executed = plan

    def sample(self, plan: StepPlan, masks: Any | None) -> StepResult:
        return self.launch_sample(plan, masks)()

    def launch_sample(self, plan: StepPlan, masks: Any | None) -> Callable[[], StepResult]:
        result = super().sample(plan, masks)

        def wait() -> StepResult:
            self.gate.wait(HOLD_SECONDS)
            self._note("executed", plan.step_id)
            if plan.step_id in self.fail_late:
                raise WorkerFault(f"step {plan.step_id} fails late")
            return result

        return wait


class _Caller:
    """The scheduling thread: every call on the executor is made on it, and none may take for ever."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._jobs.put((function, args, answers))
        try:
            answer, error = answers.get(timeout=self._seconds)
        except queue.Empty:
            name = getattr(function, "__name__", str(function))
            pytest.fail(f"{name}() has not returned after {self._seconds:.0f} s", pytrace=False)
        if error is not None:
            raise error
        return answer

    def stop(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, args, answers = job
            try:
                answers.put((function(*args), None))
            except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
                answers.put((None, error))


class ExecutorSuite(ConformanceSuite):
    """For executors whose worker lives in this process: the suite looks into it.

    seconds: how long any call may take. asynchronous: the worker's device works asynchronously, for executors that need that;
    set `device` too, where they look at it.
    """

    kind = "executor"
    seconds: ClassVar[float] = 10.0
    asynchronous: ClassVar[bool] = False

    def context_fields(self) -> dict[str, Any]:
        return {"make_worker": self.worker_class()}

    @classmethod
    def worker_class(cls) -> type[ScriptedWorker]:
        return QueuingWorker if cls.asynchronous else ScriptedWorker

    @contextlib.contextmanager
    def running(self) -> Iterator[tuple[Executor, ScriptedWorker, _Caller]]:
        """An executor, its worker, and the thread to call it on; shut down at the end."""
        made: list[ScriptedWorker] = []

        def make_worker() -> ScriptedWorker:
            made.append(self.worker_class()())
            return made[-1]

        call = _Caller(self.seconds)
        try:
            executor: Executor = call(functools.partial(self.build, make_worker=make_worker))
        except BaseException:
            call.stop()
            raise
        try:
            assert len(made) == 1, f"build made {len(made)} workers for one rank"
            yield executor, made[0], call
        finally:
            if made:
                made[0].gate.set()
            call(executor.shutdown)
            call.stop()

    @pytest.fixture
    def product(self) -> Iterator[Any]:
        with self.running() as (executor, _, _):
            yield executor

    def test_results_come_in_plan_order(self) -> None:
        """With two steps in flight each `next_result` gives the oldest one's result, unchanged."""
        with self.running() as (executor, worker, call):
            for step in range(2):
                call(executor.execute, plan(step))
                call(executor.sample, plan(step), None)
            for step in range(2, 12):
                result = call(executor.next_result)
                assert result == StepResult(step - 2, [RowResult(step - 2, [step - 2])], result.execute_seconds)
                call(executor.execute, plan(step))
                call(executor.sample, plan(step), None)
            assert [call(executor.next_result).step_id for _ in range(2)] == [10, 11]
            assert [step for _, step in worker.names("execute")] == list(range(12))

    def test_execute_and_sample_return_at_once(self) -> None:
        """The next step is planned while this one runs: neither `execute` nor `sample` waits for the worker."""
        with self.running() as (executor, worker, call):
            worker.gate.clear()
            for step in range(2):
                call(executor.execute, plan(step))
                call(executor.sample, plan(step), None)
            assert not worker.names("executed"), "execute() or sample() waited until the worker was done"
            worker.gate.set()
            assert [call(executor.next_result).step_id for _ in range(2)] == [0, 1]

    def test_masks_reach_the_worker(self) -> None:
        """What `sample` is given goes to the worker's `sample` of the same step."""
        with self.running() as (executor, worker, call):
            call(executor.execute, plan(0))
            call(executor.sample, plan(0), "masks of step 0")
            call(executor.next_result)
            assert worker.names("sample") == [("sample", (0, "masks of step 0"))]

    @pytest.mark.parametrize("where", ["execute", "sample"])
    def test_worker_faults_come_through_next_result(self, where: str) -> None:
        """`next_result` raises what the worker raised, for the step that met it; the results before it are not lost."""
        with self.running() as (executor, worker, call):
            getattr(worker, f"fail_{where}").add(1)
            for step in range(2):
                call(executor.execute, plan(step))
                call(executor.sample, plan(step), None)
            assert call(executor.next_result).step_id == 0
            with pytest.raises(WorkerFault, match=f"step 1 fails in {where}"):
                call(executor.next_result)

    def test_late_faults_come_through_next_result(self) -> None:
        """A fault that the device reports only when it is waited for comes out for that step and for every later one."""
        if not self.asynchronous:
            pytest.skip("the worker of this suite computes when it is called")
        with self.running() as (executor, worker, call):
            assert isinstance(worker, QueuingWorker)
            worker.fail_late.add(0)
            for step in range(2):
                call(executor.execute, plan(step))
                call(executor.sample, plan(step), None)
            for _ in range(2):
                with pytest.raises(WorkerFault, match="step 0 fails late"):
                    call(executor.next_result)
            with pytest.raises(EngineDeadError):
                call(executor.check_health)

    def test_health_after_a_fault(self) -> None:
        """`check_health` says nothing while all is well, and raises EngineDeadError once the worker has failed."""
        with self.running() as (executor, worker, call):
            call(executor.check_health)
            worker.fail_execute.add(0)
            call(executor.execute, plan(0))
            call(executor.sample, plan(0), None)
            with contextlib.suppress(WorkerFault):
                call(executor.next_result)
            with pytest.raises(EngineDeadError):
                call(executor.check_health)

    def test_collective_runs_after_the_steps_in_flight(self) -> None:
        """`collective` gives one answer per rank, after every step that was queued before it."""
        with self.running() as (executor, worker, call):
            for step in range(2):
                call(executor.execute, plan(step))
                call(executor.sample, plan(step), None)
            assert call(executor.collective, "report", 1, "two") == [("report", (1, "two"))]
            order = [name for name, _ in worker.names("execute", "sample", "collective")]
            assert order == ["execute", "sample", "execute", "sample", "collective"]
            assert [call(executor.next_result).step_id for _ in range(2)] == [0, 1]

    def test_failing_collective_is_the_callers(self) -> None:
        """A method that fails raises where it was called, and steps go on: no step has met a fault."""
        with self.running() as (executor, _, call):
            with pytest.raises(WorkerFault, match="the method fails"):
                call(executor.collective, "fail")
            call(executor.check_health)
            call(executor.execute, plan(0))
            call(executor.sample, plan(0), None)
            assert call(executor.next_result).step_id == 0

    def test_worker_is_used_on_one_thread(self) -> None:
        """The worker is made, used and shut down on one thread: a device context belongs to a thread."""
        with self.running() as (executor, worker, call):
            for step in range(4):
                call(executor.execute, plan(step))
                call(executor.sample, plan(step), None)
                call(executor.next_result)
            call(executor.collective, "report")
            call(executor.shutdown)
            assert len(worker.threads) == 1, f"the worker was used on {len(worker.threads)} threads"

    def test_shutdown_is_idempotent(self) -> None:
        """`shutdown` may be called again; the worker is shut down once, and its health is then EngineDeadError."""
        with self.running() as (executor, worker, call):
            for _ in range(3):
                call(executor.shutdown)
            assert worker.num_shutdowns == 1, f"the worker was shut down {worker.num_shutdowns} times"
            with pytest.raises(EngineDeadError):
                call(executor.check_health)

    def test_shutdown_with_steps_in_flight(self) -> None:
        """`shutdown` returns although results were never fetched, and leaves no thread behind."""
        before = set(threading.enumerate())
        with self.running() as (executor, worker, call):
            for step in range(2):
                call(executor.execute, plan(step))
                call(executor.sample, plan(step), None)
            call(executor.shutdown)
            assert worker.num_shutdowns == 1
        end = time.monotonic() + min(2.0, self.seconds)
        while left := [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]:
            assert time.monotonic() < end, f"threads are left behind: {', '.join(thread.name for thread in left)}"
            time.sleep(0.01)

    def test_worker_that_cannot_be_made_is_reported(self) -> None:
        """When `make_worker` raises, `build` raises too, with its reason: the engine must not start."""

        def make_worker() -> Worker:
            raise WorkerFault("no such device")

        with pytest.raises((PluginError, WorkerFault), match="no such device"):
            self.build(make_worker=make_worker)
