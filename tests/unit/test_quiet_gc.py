"""The collector rests while the offline engine generates, and is as the user had it afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hotswap import LLM, SamplingParams
from hotswap.core.config import EngineConfig
from hotswap.core.engine import llm as llm_module
from hotswap.core.engine.output_processor import OutputProcessor
from hotswap.core.engine.quiet_gc import CALL, PROCESS, collected_rarely, settle_process
from hotswap.core.testing.scripted_model import PLUGIN, make_scripted_model

USERS = (900, 11, 12)


@pytest.fixture(autouse=True)
def users_settings() -> Iterator[None]:
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.enable()
    gc.set_threshold(*USERS)
    yield
    gc.set_threshold(*before)
    (gc.enable if enabled else gc.disable)()


def test_thresholds_are_raised_inside_and_put_back() -> None:
    with collected_rarely():
        assert gc.get_threshold() == CALL
    assert gc.get_threshold() == USERS


def test_put_back_after_an_exception() -> None:
    with pytest.raises(KeyError), collected_rarely():
        raise KeyError("a fault of the step")
    assert gc.get_threshold() == USERS


@pytest.mark.parametrize("interrupted", ["isenabled", "get_threshold", "set_threshold"])
def test_an_interrupt_on_the_way_in_leaves_nothing_behind(interrupted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come between any two of its statements."""

    def interrupt(*values: int) -> None:
        monkeypatch.undo()  # once
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, interrupted, interrupt)
    with pytest.raises(KeyboardInterrupt), collected_rarely():
        raise AssertionError("it was not interrupted")
    assert gc.get_threshold() == USERS
    test_thresholds_are_raised_inside_and_put_back()


def test_put_back_when_a_generator_is_left_early() -> None:
    def tokens() -> Iterator[int]:
        with collected_rarely():
            yield from range(9)

    stream = tokens()
    assert next(stream) == 0
    assert gc.get_threshold() == CALL
    stream.close()  # type: ignore[attr-defined]
    assert gc.get_threshold() == USERS


def test_one_within_the_other() -> None:
    with collected_rarely():
        with collected_rarely():
            assert gc.get_threshold() == CALL
        assert gc.get_threshold() == CALL, "the outer one goes on"
    assert gc.get_threshold() == USERS


def test_the_thread_that_leaves_last_puts_them_back() -> None:
    """The one that came first leaves first: it must not take the other's rest away, nor leave its own behind."""
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    seen: list[object] = []

    def first() -> None:
        with collected_rarely():
            first_is_in.set()
            second_is_in.wait(5)
        first_is_out.set()

    def second() -> None:
        first_is_in.wait(5)
        with collected_rarely():
            second_is_in.set()
            first_is_out.wait(5)
            seen.append(gc.get_threshold())

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == [CALL]
    assert gc.get_threshold() == USERS


def test_rarer_settings_of_the_users_stay() -> None:
    rare = (CALL[0] + 1, CALL[1] - 1, CALL[2] + 7)
    gc.set_threshold(*rare)
    with collected_rarely():
        assert gc.get_threshold() == (rare[0], CALL[1], rare[2])
    assert gc.get_threshold() == rare


@pytest.mark.parametrize("off", [gc.disable, lambda: gc.set_threshold(0, 3, 4)])
def test_a_collector_that_is_off_is_not_touched(off: Any) -> None:
    off()
    before = gc.get_threshold(), gc.isenabled()
    with collected_rarely():
        assert (gc.get_threshold(), gc.isenabled()) == before
    assert (gc.get_threshold(), gc.isenabled()) == before


def test_what_the_user_sets_meanwhile_stays() -> None:
    with collected_rarely():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)
    with collected_rarely():
        gc.disable()
    assert (gc.get_threshold(), gc.isenabled()) == ((123, 4, 5), False)


def test_the_engine_process_freezes_what_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(gc, "set_threshold", lambda *values: done.append(values))
    settle_process()
    assert done == ["collect", "freeze", PROCESS]


# The offline engine.


def llm_whose_step(step: Any) -> LLM:
    """It has work for three steps, and no request."""
    turns = iter([True] * 3)
    core = SimpleNamespace(has_work=lambda: next(turns, False), step=step, shutdown=lambda: None)
    llm = LLM.__new__(LLM)
    llm._engine = cast(Any, SimpleNamespace(core=core))
    llm._front = cast(Any, SimpleNamespace(outputs=OutputProcessor(None)))
    llm._closed = False
    llm.config = EngineConfig()
    return llm


@pytest.mark.parametrize("fault", [None, KeyboardInterrupt, MemoryError])
def test_llm_lets_the_collector_rest_between_steps_only(fault: type[BaseException] | None) -> None:
    seen: list[object] = []

    def step() -> list[object]:
        seen.append(gc.get_threshold())
        if fault is not None and len(seen) == 2:
            raise fault
        return []

    with pytest.raises(fault) if fault is not None else nullcontext():
        llm_whose_step(step)._run([], [], [], use_tqdm=False)
    assert set(seen) == {CALL}
    assert gc.get_threshold() == USERS


def collections_in_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The generations that were collected while it was in a step."""
    seen: set[int] = set()
    depth: list[None] = []
    core = llm._engine.core
    step = core.step

    def watched() -> Any:
        depth.append(None)
        try:
            return step()
        finally:
            depth.pop()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and depth:
            seen.add(info["generation"])

    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, logprobs=0)
    with monkeypatch.context() as patch:
        patch.setattr(core, "step", watched)
        gc.callbacks.append(note)
        try:
            llm.generate([[number + 5] for number in range(16)], params, use_tqdm=False)
        finally:
            gc.callbacks.remove(note)
    return seen


def test_generate_is_not_interrupted_and_the_users_heap_is_not_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.set_threshold(50, 2, 2)
    frozen = gc.get_freeze_count()
    folder = make_scripted_model(tmp_path)
    with LLM(str(folder), plugins=[PLUGIN, "model=scripted,instant=70"], num_gpu_blocks_override=99) as llm:
        assert gc.get_freeze_count() == frozen
        assert collections_in_steps(llm, monkeypatch) == set()
        assert gc.get_freeze_count() == frozen
        monkeypatch.setattr(llm_module, "collected_rarely", nullcontext)
        assert 1 in collections_in_steps(llm, monkeypatch), "without it the same work is interrupted"
