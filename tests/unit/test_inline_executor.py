"""The inline executor: what its conformance suite does not ask."""

from __future__ import annotations

import threading

import pytest

from hotswap.core.clock import ManualClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts import DeviceInfo, EngineDeadError, ExecutorContext
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.testing.suites.executor import QueuingWorker, WorkerFault, plan
from hotswap.plugins import BUILTIN_PLUGINS
from hotswap.plugins.executors.inline import InlineExecutor


def make() -> tuple[InlineExecutor, QueuingWorker]:
    worker = QueuingWorker()
    return InlineExecutor(lambda: worker), worker


def put(executor: InlineExecutor, step: int) -> None:
    executor.execute(plan(step))
    executor.sample(plan(step), None)


def test_it_starts_no_thread() -> None:
    before = threading.active_count()
    executor, worker = make()
    put(executor, 0)
    assert executor.next_result().step_id == 0
    assert threading.active_count() == before
    assert worker.threads == {threading.get_ident()}
    executor.shutdown()


def test_next_result_without_a_step() -> None:
    executor, _ = make()
    with pytest.raises(RuntimeError, match="no step is in flight"):
        executor.next_result()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.check_health()


def test_no_step_runs_after_a_fault_and_every_later_one_raises_it() -> None:
    executor, worker = make()
    worker.fail_execute.add(1)
    for step in range(3):
        put(executor, step)
    assert executor.next_result().step_id == 0
    for _ in range(3):  # also when nothing is in flight any more
        with pytest.raises(WorkerFault, match="step 1 fails in execute"):
            executor.next_result()
    assert [step for _, step in worker.names("execute")] == [0, 1]
    with pytest.raises(EngineDeadError, match="step 1 fails"):
        executor.collective("report")


def test_the_first_fault_is_the_one_that_is_raised() -> None:
    """The device reports that step 0 failed when step 1 has failed at its launch already: what was queued behind step 0 counts
    for nothing."""
    executor, worker = make()
    worker.fail_late.add(0)
    worker.fail_execute.add(1)
    put(executor, 0)
    put(executor, 1)
    for _ in range(2):
        with pytest.raises(WorkerFault, match="step 0 fails late"):
            executor.next_result()


def test_collective_meets_a_fault_of_a_step_in_flight() -> None:
    executor, worker = make()
    worker.fail_late.add(1)
    for step in range(3):
        put(executor, step)
    with pytest.raises(EngineDeadError, match="step 1 fails late"):
        executor.collective("report")
    assert not worker.names("collective")
    assert executor.next_result().step_id == 0  # it was done before
    for _ in range(2):
        with pytest.raises(WorkerFault, match="step 1 fails late"):
            executor.next_result()


def test_collective_keeps_the_results_in_line() -> None:
    executor, worker = make()
    put(executor, 0)
    put(executor, 1)
    assert executor.collective("report") == [("report", ())]
    assert [name for name, _ in worker.calls[-3:]] == ["executed", "executed", "collective"]
    put(executor, 2)
    assert [executor.next_result().step_id for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "chosen"), [("cpu", "in_process"), ("host", "in_process"), ("cuda", "inline"), ("rocm", "inline")]
)
def test_the_device_decides(kind: str, chosen: str) -> None:
    manager = PluginManager(builtins=BUILTIN_PLUGINS)
    manager.load()
    context = ExecutorContext(
        options=None,
        config=EngineConfig(),
        device=DeviceInfo(kind, "a device"),
        clock=ManualClock(),
        make_worker=QueuingWorker,
    )
    assert manager.choose("executor", context).name == chosen
