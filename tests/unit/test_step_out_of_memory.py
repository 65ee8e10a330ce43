"""A device without memory in the middle of serving: one line, with the one flag to change, for the log and for clients."""

from __future__ import annotations

import logging
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hotswap.core.clock import ManualClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.executor import Executor, Worker
from hotswap.core.contracts.plan import StepPlan, StepResult
from hotswap.core.engine import process
from hotswap.core.engine.engine_core import EngineCore
from hotswap.core.engine.launch import EngineSetup
from hotswap.core.engine.llm import LLM
from hotswap.core.engine.output_processor import OutputProcessor
from hotswap.core.engine.wire import Dead, EngineInfo, EngineMessage, EngineRequest, FrontMessage
from hotswap.core.errors import EngineDeadError
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.runner.memory_report import explain_step_out_of_memory
from hotswap.core.sampling_params import SamplingParams
from hotswap.core.testing.scheduling_harness import SchedulingHarness
from hotswap.plugins.executors.in_process import InProcessExecutor
from hotswap.plugins.executors.inline import InlineExecutor
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.victims.newest import Newest

TORCHS = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.10 GiB is free."
)
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
OTHER = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")
ADVICE = "Lower --gpu-memory-utilization (now 0.9)"
LINES: dict[Exception, str] = {
    TORCHS: f"the device ran out of memory in a step when 1.50 GiB more were asked for. {ADVICE}",
    CUBLAS: f"the device ran out of memory in a step. {ADVICE}",
    OTHER: "RuntimeError: CUDA error: an illegal memory access was encountered",
}


class Raising(Worker):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def execute(self, plan: StepPlan) -> None:
        raise self._error

    def sample(self, plan: StepPlan, masks: Any | None) -> StepResult:
        raise AssertionError("the step has failed")

    def collective(self, method: str, *args: Any) -> Any:
        return None

    def shutdown(self) -> None:
        pass


class Link:
    """One request comes; what is said is kept."""

    num_bad_frames = 0

    def __init__(self) -> None:
        self.sent: list[EngineMessage] = []
        self._incoming: list[FrontMessage] = [EngineRequest(1, [1, 2, 3], SamplingParams(max_tokens=4), 0.0)]

    def send(self, message: EngineMessage) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float) -> list[FrontMessage]:
        incoming, self._incoming = self._incoming, []
        return incoming

    def close(self, linger_s: float = 1.0) -> None:
        pass


def core_with(executor: Executor) -> EngineCore:
    policy = Fcfs()
    harness = SchedulingHarness(lambda mechanism: ContinuousBatching(mechanism, policy, Newest()), policy)
    clock = ManualClock()
    return EngineCore(harness.mechanism, harness.scheduler, executor, clock, max_steps_in_flight=2, logits_width=64)


def serve(executor: Executor) -> list[EngineMessage]:
    """The engine process's loop to its end; what it said."""
    folder = Path(tempfile.mkdtemp(prefix="hs-"))
    config = EngineConfig().to_json().encode()
    setup = EngineSetup(config, b"", {}, "", "", f"ipc://{folder / 'in'}", f"ipc://{folder / 'out'}")
    info = EngineInfo("tiny", "Tiny", "float32", 64, 63, 512, 16, 16, 4, 64, "cpu")
    engine = SimpleNamespace(core=core_with(executor), info=info, admin=None)
    parent = SimpleNamespace(ask_first=lambda ask: None, thread=threading.main_thread())
    manager, link = PluginManager(builtins=()), Link()
    try:
        assert process._serve(setup, cast(Any, link), manager, cast(Any, engine), cast(Any, parent)) == 1
    finally:
        executor.shutdown()
    return link.sent


@pytest.mark.parametrize("error", LINES, ids=["torch", "cublas", "other"])
@pytest.mark.parametrize("executor", [InProcessExecutor, InlineExecutor])
def test_a_worker_s_error_becomes_one_line(
    executor: Any, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "settle_process", lambda: None)  # this process goes on
    with caplog.at_level(logging.INFO, "hotswap"):
        *_, last = serve(executor(lambda: Raising(error)))
    assert last == Dead(LINES[error])
    line, *trace = [record for record in caplog.records if record.name == "hotswap.engine"]
    assert line.getMessage() == f"the engine stops: {LINES[error]}" and line.exc_info is None
    assert bool(trace) == (error is OTHER), "a traceback says nothing about what to change"


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"gpu_memory_utilization": 0.95}, "Lower --gpu-memory-utilization (now 0.95)"),
        ({"kv_cache_memory_bytes": 2**40}, f"Lower --kv-cache-memory-bytes (now {2**40})"),
        ({"num_gpu_blocks_override": 9}, "Lower --num-gpu-blocks-override (now 9)"),
    ],
)
def test_the_flag_is_the_one_that_gave_the_cache_its_size(settings: dict[str, Any], advice: str) -> None:
    line = explain_step_out_of_memory(CUBLAS, EngineConfig.from_flat(**settings))
    assert line == f"the device ran out of memory in a step. {advice}"


def test_it_is_found_beneath_others() -> None:
    try:
        try:
            raise TORCHS
        except torch.OutOfMemoryError as error:
            raise EngineDeadError("the worker failed") from error
    except EngineDeadError as error:
        assert explain_step_out_of_memory(error, EngineConfig()) == LINES[TORCHS]
    hidden = KeyError("x")
    hidden.__context__, hidden.__suppress_context__ = TORCHS, True
    assert explain_step_out_of_memory(hidden, EngineConfig()) is None
    hidden.__suppress_context__ = False
    assert explain_step_out_of_memory(hidden, EngineConfig()) == LINES[TORCHS]
    TORCHS.__cause__ = hidden  # a ring
    try:
        assert explain_step_out_of_memory(OTHER, EngineConfig()) is None
        assert explain_step_out_of_memory(hidden, EngineConfig()) == LINES[TORCHS]
    finally:
        TORCHS.__cause__ = None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), ValueError("x")])
def test_offline_the_advice_is_a_note_and_the_error_its_own(error: Exception) -> None:
    ended: list[bool] = []

    def step() -> None:
        raise error

    core = SimpleNamespace(has_work=lambda: True, step=step, shutdown=lambda: ended.append(True))
    llm = LLM.__new__(LLM)
    llm._engine = cast(Any, SimpleNamespace(core=core))
    llm._front = cast(Any, SimpleNamespace(outputs=OutputProcessor(None)))
    llm._closed, llm.config = False, EngineConfig()
    with pytest.raises(type(error)) as caught:
        llm._run([], [], [], use_tqdm=False)
    expected = [LINES[CUBLAS]] if isinstance(error, torch.OutOfMemoryError) else []
    assert getattr(caught.value, "__notes__", []) == expected
    assert ended == [True]
