"""Observers: what they hear, what it costs not to listen, and that what they raise stays with them."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from hotswap import LLM, SamplingParams
from hotswap.core.clock import ManualClock
from hotswap.core.contracts.observer import FinishedRequest, Observer, StepObservation
from hotswap.core.contracts.policy import RequestView
from hotswap.core.engine.engine_core import EngineCore
from hotswap.core.engine.observers import CLOSE_SECONDS, ObserverSet
from hotswap.core.engine.wire import EngineRequest
from hotswap.core.errors import PluginError
from hotswap.core.testing.scheduling_harness import SchedulingHarness
from hotswap.core.testing.tiny_models import make_tiny_model
from hotswap.core.trace import TraceRow, read_trace
from hotswap.plugins.observers.trace import Trace
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.victims.newest import Newest


class Listens(Observer):
    def __init__(self) -> None:
        self.arrivals: list[int] = []
        self.steps: list[StepObservation] = []
        self.ends: list[FinishedRequest] = []
        self.closed = 0

    def on_arrival(self, view: RequestView) -> None:
        self.arrivals.append(view.request_id)

    def on_step(self, step: StepObservation) -> None:
        self.steps.append(step)

    def on_finish(self, request: FinishedRequest) -> None:
        self.ends.append(request)

    def close(self) -> None:
        self.closed += 1


class Raises(Listens):
    def on_step(self, step: StepObservation) -> None:
        super().on_step(step)
        raise ValueError("I do not like steps")

    def close(self) -> None:
        super().close()
        raise ValueError("nor the end")


class OnlyEnds(Observer):
    def __init__(self) -> None:
        self.ends: list[int] = []

    def on_finish(self, request: FinishedRequest) -> None:
        self.ends.append(request.request_id)


def core_with(observers: ObserverSet, **settings: Any) -> tuple[EngineCore, ManualClock]:
    policy = Fcfs()
    harness = SchedulingHarness(lambda m: ContinuousBatching(m, policy, Newest()), policy, **settings)
    clock = ManualClock(100.0)
    harness.mechanism._state.clock = clock
    core = EngineCore(
        harness.mechanism,
        harness.scheduler,
        harness.executor,
        clock,
        max_steps_in_flight=2,
        logits_width=10_000,
        observers=observers,
    )
    return core, clock


def ask(core: EngineCore, request_id: int, count: int = 5, arrival: float = 100.0, **fields: Any) -> Any:
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    return core.add_request(EngineRequest(request_id, [1] * count, sampling, arrival, **fields))


def run(core: EngineCore, clock: ManualClock) -> None:
    while core.has_work():
        clock.advance(0.5)
        core.step()


def test_arrivals_steps_and_ends() -> None:
    listens = Listens()
    core, clock = core_with(ObserverSet([("x", listens)]))
    assert ask(core, 1, user="alice", priority=4) is None
    ask(core, 2)
    assert ask(core, 3, count=500) is not None, "refused at the door: it never arrived"
    core.abort([2])
    run(core, clock)
    assert listens.arrivals == [1, 2]
    assert [end.request_id for end in listens.ends] == [2, 1]
    aborted, finished = listens.ends
    assert (aborted.finish_reason, aborted.num_output_tokens, aborted.first_scheduled_time) == ("abort", 0, None)
    assert (finished.finish_reason, finished.num_prompt_tokens, finished.num_output_tokens) == ("length", 5, 3)
    assert (finished.user, finished.priority, finished.arrival_time) == ("alice", 4, 100.0)
    assert finished.first_scheduled_time == 100.5 and finished.first_token_time == 100.5
    assert finished.finish_time == clock.now()
    assert [step.num_tokens for step in listens.steps] == [5, 1, 1]
    assert [step.num_requests for step in listens.steps] == [1, 1, 1]
    assert [step.step_id for step in listens.steps] == [0, 1, 2]
    assert (listens.steps[-1].num_running, listens.steps[-1].kv_usage) == (0, 0.0)


def test_waiting_and_prefill_times_come_with_the_first_token() -> None:
    core, clock = core_with(ObserverSet(), max_num_seqs=1, max_num_batched_tokens=4)
    ask(core, 1, count=8)
    ask(core, 2, count=8)
    seen: dict[int, list[tuple[float | None, float | None]]] = {}
    while core.has_work():
        clock.advance(1.0)
        for update in core.step():
            seen.setdefault(update.request_id, []).append((update.queue_seconds, update.prefill_seconds))
    # Two chunks of four tokens, both planned in the first second; the token is confirmed in the second one.
    assert seen[1] == [(1.0, 1.0), (None, None), (None, None)]
    (queued, prefilled), *rest = seen[2]
    assert queued is not None and queued > 2.0 and prefilled is not None and prefilled >= 0.0
    assert rest == [(None, None)] * 2


def test_histograms_count_every_step() -> None:
    core, clock = core_with(ObserverSet())
    ask(core, 1)
    run(core, clock)
    stats = core.stats()
    assert stats.num_steps == 3
    for histogram in (stats.step_tokens, stats.schedule_times, stats.execute_times, stats.update_times):
        assert sum(histogram.counts) == 3
    assert stats.step_tokens.sum == 7


def test_what_an_observer_raises_is_logged_once_a_callback_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    raises, listens = Raises(), Listens()
    core, clock = core_with(ObserverSet([("observer 'bad' of x 1.0", raises), ("y", listens)]))
    ask(core, 1)
    with caplog.at_level(logging.ERROR):
        run(core, clock)
        assert len(raises.steps) == len(listens.steps) == 3, "both are called to the end"
        core.shutdown()
    assert core.stats().num_observer_faults == 4
    assert [record.getMessage() for record in caplog.records] == [
        "observer 'bad' of x 1.0: on_step() raised; more of these are counted only",
        "observer 'bad' of x 1.0: close() raised; more of these are counted only",
    ]
    assert (raises.closed, listens.closed) == (1, 1)
    core.shutdown()
    assert listens.closed == 1


def test_callbacks_that_are_not_overridden_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(Observer, "on_step", lambda *_: called.append("step"))
    observer = OnlyEnds()
    observers = ObserverSet([("x", observer)])
    assert observers.wants_ends and not observers.wants_steps
    core, clock = core_with(observers)
    ask(core, 1)
    run(core, clock)
    assert observer.ends == [1] and not called
    quiet, clock = core_with(ObserverSet())
    ask(quiet, 1)
    run(quiet, clock)
    assert quiet.mechanism.take_ended() == []


def test_an_observer_that_hangs_does_not_keep_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(Observer):
        def close(self) -> None:
            time.sleep(30)

    monkeypatch.setattr("hotswap.core.engine.observers.CLOSE_SECONDS", 0.05)
    assert CLOSE_SECONDS == 1.0
    started = time.monotonic()
    ObserverSet([("x", Hangs())]).close()
    assert time.monotonic() - started < 5


# The built-in one.


def finished(request_id: int, arrival: float, **fields: Any) -> FinishedRequest:
    values: dict[str, Any] = {
        "request_id": request_id,
        "finish_reason": "stop",
        "num_prompt_tokens": 7,
        "num_output_tokens": 2,
        "num_cached_prompt_tokens": 0,
        "num_preemptions": 0,
        "arrival_time": arrival,
        "first_scheduled_time": None,
        "first_token_time": None,
        "finish_time": 0.0,
        "user": "",
        "priority": 0,
    }
    return FinishedRequest(**{**values, **fields})


def wait_for_lines(path: Path, count: int) -> None:
    end = time.monotonic() + 5
    while path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_trace_counts_from_the_first_arrival_and_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("what was there before")
    trace = Trace(path)
    view: Any = finished(1, 50.0)
    trace.on_arrival(view)
    trace.on_finish(finished(2, 51.5, user="bob", priority=-1))
    trace.on_finish(finished(1, 50.0))
    wait_for_lines(path, 2)
    assert path.read_text().splitlines()[0] == (
        '{"arrival":1.5,"prompt_tokens":7,"output_tokens":2,"user":"bob","priority":-1}'
    )
    assert read_trace(path) == [TraceRow(0.0, 7, 2), TraceRow(1.5, 7, 2, user="bob", priority=-1)]
    trace.close()


def test_a_trace_tells_of_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    trace = Trace(Path("/dev/full"))
    trace.on_finish(finished(1, 0.0))
    trace._thread.join(5)
    with pytest.raises(OSError, match="nothing more is written"):
        trace.on_finish(finished(2, 0.0))
    trace.close()


def test_a_trace_of_an_engine(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "model"))
    path = tmp_path / "trace.jsonl"
    settings: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 2**21}
    with pytest.raises(PluginError, match=r"observer 'trace': cannot write \S+/absent/t: No such file"):
        LLM(model, plugins=[f"observer=trace,path={tmp_path / 'absent' / 't'}"], **settings)
    with pytest.raises(PluginError, match="option 'path' is required"):
        LLM(model, plugins=["observer=trace"], **settings)
    with LLM(model, plugins=[f"observer=trace,path={path}"], **settings) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True, n=2)
        outputs = llm.generate([[5, 6, 7], [8, 9]], params, use_tqdm=False)
        states = {row["kind"]: row["state"] for row in llm.info.inventory if row["name"] == "trace"}
        assert states == {"observer": "active"}
    assert all(len(output.queue_seconds) == len(output.prefill_seconds) == 2 for output in outputs)
    rows = read_trace(path)
    assert sorted((row.prompt_tokens, row.output_tokens) for row in rows) == [(2, 4), (2, 4), (3, 4), (3, 4)]
    assert rows[0].arrival == 0.0
