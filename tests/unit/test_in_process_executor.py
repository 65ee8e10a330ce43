"""The in-process executor: order, faults, administration."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from hotswap.core.contracts import EngineDeadError, Executor, Worker
from hotswap.core.contracts.plan import StepPlan, StepResult
from hotswap.plugins.executors.in_process import InProcessExecutor, hotswap_executor


class FakeWorker(Worker):
    """Notes what is asked of it, and on which thread; waits or fails when told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.threads = {threading.get_ident()}
        self.gate = threading.Event()
        self.gate.set()
        self.fail_at: int | None = None
        self.was_shut_down = False

    def execute(self, plan: StepPlan) -> None:
        self.threads.add(threading.get_ident())
        assert self.gate.wait(10)
        if plan.step_id == self.fail_at:
            raise FloatingPointError(f"step {plan.step_id} broke")
        self.calls.append(f"execute {plan.step_id}")

    def sample(self, plan: StepPlan, masks: Any | None) -> StepResult:
        self.calls.append(f"sample {plan.step_id} {masks}")
        return StepResult(plan.step_id, [])

    def collective(self, method: str, *args: Any) -> Any:
        if method == "bad":
            raise ValueError("no such method")
        self.calls.append(f"{method} {args}")
        return "done"

    def shutdown(self) -> None:
        self.was_shut_down = True


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, [], [], [], 0)


def make() -> tuple[InProcessExecutor, FakeWorker]:
    made: list[FakeWorker] = []

    def make_worker() -> FakeWorker:
        made.append(FakeWorker())
        return made[0]

    return InProcessExecutor(make_worker), made[0]


def put(executor: Executor, step_id: int) -> None:
    executor.execute(plan(step_id))
    executor.sample(plan(step_id), None)


def test_steps_run_in_order_on_one_other_thread() -> None:
    executor, worker = make()
    for step_id in range(3):
        put(executor, step_id)
    assert [executor.next_result().step_id for _ in range(3)] == [0, 1, 2]
    assert worker.calls == [f"{what}" for i in range(3) for what in (f"execute {i}", f"sample {i} None")]
    assert len(worker.threads) == 1 and threading.get_ident() not in worker.threads
    executor.shutdown()


def test_execute_and_sample_return_at_once_and_next_result_waits() -> None:
    executor, worker = make()
    worker.gate.clear()
    put(executor, 1)
    put(executor, 2)
    assert worker.calls == []
    threading.Timer(0.05, worker.gate.set).start()
    assert executor.next_result().step_id == 1
    assert executor.next_result().step_id == 2
    executor.shutdown()


def test_a_fault_in_execute_is_raised_where_the_result_is_awaited() -> None:
    executor, worker = make()
    worker.fail_at = 2
    for step_id in (1, 2, 3):
        put(executor, step_id)
    assert executor.next_result().step_id == 1
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="step 2 broke"):
            executor.next_result()
    assert "execute 3" not in worker.calls and worker.was_shut_down
    with pytest.raises(EngineDeadError, match="FloatingPointError: step 2 broke"):
        executor.check_health()
    with pytest.raises(EngineDeadError):
        executor.collective("reset")


def test_waiting_for_nothing_is_an_error_not_a_hang() -> None:
    executor, _ = make()
    with pytest.raises(RuntimeError, match="no step is in flight"):
        executor.next_result()
    executor.shutdown()


def test_collective_runs_after_the_steps_in_flight() -> None:
    executor, worker = make()
    worker.gate.clear()
    put(executor, 1)
    threading.Timer(0.05, worker.gate.set).start()
    assert executor.collective("reset", 5) == ["done"]
    assert worker.calls == ["execute 1", "sample 1 None", "reset (5,)"]
    with pytest.raises(ValueError, match="no such method"):
        executor.collective("bad")
    executor.check_health()
    executor.shutdown()


def test_what_make_worker_raises_reaches_the_constructor() -> None:
    def broken() -> Worker:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        InProcessExecutor(broken)


def test_shutdown_is_idempotent_drops_what_is_queued_and_frees_the_worker() -> None:
    executor, worker = make()
    worker.gate.clear()
    for step_id in range(5):
        put(executor, step_id)
    while not len(worker.threads) > 0:
        time.sleep(0.001)
    threading.Timer(0.05, worker.gate.set).start()
    executor.shutdown()
    executor.shutdown()
    assert worker.was_shut_down
    assert len(worker.calls) <= 2
    with pytest.raises(EngineDeadError, match="ended"):
        executor.check_health()


def test_the_hook_offers_the_executor_without_torch() -> None:
    provider = next(hotswap_executor())
    assert (provider.name, list(provider.unavailable(_Context(1)))) == ("in_process", [])
    assert provider.unavailable(_Context(2))
    code = "import sys, hotswap.plugins.executors.in_process; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )


class _Context:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
