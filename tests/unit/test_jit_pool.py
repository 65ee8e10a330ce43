"""The kernel threads: every item once, whoever takes part; callers that collide; children of a fork."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from hotswap.core.layers.jit import Module, compile_module, host_target, parallel_function, pool, team_size


@pytest.fixture(params=[pool.POOL_RUN, pool.OPENMP_RUN])
def _runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels built in the test run on the pool's own threads, or on torch's."""
    spins = request.param == pool.OPENMP_RUN
    monkeypatch.setattr(pool, "_torch_threads_spin", lambda: spins)
    if pool.run_symbol.__wrapped__() != request.param:
        pytest.skip("this torch has no GNU OpenMP")
    monkeypatch.setattr(pool, "run_symbol", lambda: request.param)


@pytest.fixture
def _own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pool.thread_pool()
    monkeypatch.setattr(pool, "run_symbol", lambda: pool.POOL_RUN)


def counting_kernel() -> Callable[..., None]:
    """f(counts, threads) adds one to each element of counts (int64), after some work that takes a while."""
    params = [("counts", "ptr"), ("n", "i64"), ("work", "i64")]

    def build() -> Module:
        module = Module("count", host_target())
        with parallel_function(module, "count", params) as team:
            counts = team.buffer("counts", "i64")
            with team.items(team.arg["n"]) as item:
                busy = team.fn.var(item.type, 0)
                with team.fn.loop(0, team.arg["work"]) as index:
                    busy.set(busy.get() * 3 + index)
                # The work is kept by an addend that is 0 or 1 << 40.
                counts.store(counts.load(item) + 1 + (busy.get().eq(12345)).select(team.fn.i64(1 << 40), 0), item)
        return module

    code = compile_module(build)
    native = code.function("count", ["ptr", "i64", "i64", "i64"])

    def call(counts: torch.Tensor, threads: int, work: int = 50) -> None:
        native(counts.data_ptr(), counts.numel(), work, threads)
        assert code

    return call


@pytest.mark.usefixtures("_runner")
def test_every_item_runs_exactly_once() -> None:
    count = counting_kernel()
    for threads in (1, 2, 4):
        team_size(threads)
        counts = torch.zeros(257, dtype=torch.int64)
        for _ in range(200):
            count(counts, threads)
        assert (counts == 200).all()


@pytest.mark.usefixtures("_runner")
def test_helpers_wake_after_they_slept() -> None:
    count = counting_kernel()
    team_size(2)
    counts = torch.zeros(64, dtype=torch.int64)
    for _ in range(20):
        count(counts, 2, 1000)
        threading.Event().wait(0.003)
    assert (counts == 20).all()


@pytest.mark.usefixtures("_runner")
def test_callers_from_several_threads_do_not_mix_their_work() -> None:
    count = counting_kernel()
    team_size(2)
    totals = [torch.zeros(33 + i, dtype=torch.int64) for i in range(3)]

    def work(counts: torch.Tensor) -> None:
        for _ in range(300):
            count(counts, 2)

    callers = [threading.Thread(target=work, args=(counts,)) for counts in totals]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((counts == 300).all() for counts in totals)


@pytest.mark.usefixtures("_runner")
def test_no_items_and_more_threads_than_items() -> None:
    count = counting_kernel()
    team_size(4)
    count(torch.zeros(0, dtype=torch.int64), 4)
    counts = torch.zeros(1, dtype=torch.int64)
    count(counts, 4)
    assert counts.tolist() == [1]


@pytest.mark.usefixtures("_own_threads")
def test_a_forked_child_has_its_own_helpers() -> None:
    count = counting_kernel()
    team_size(2)
    counts = torch.zeros(100, dtype=torch.int64)
    count(counts, 2)
    child = os.fork()
    if child == 0:
        try:
            team_size(2)
            for _ in range(50):
                count(counts, 2)
            os._exit(0 if (counts == 51).all() else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    count(counts, 2)
    assert (counts == 2).all()


_crowds: list[pool.ThreadPool] = []  # helper threads use their pool's memory for ever


def test_a_crowd_of_sleepers_wakes_whole() -> None:
    """Whoever takes sleepers off the list owes each of them a byte, also when they are more than one message has room
    for."""
    crowd = pool.ThreadPool(pool.thread_pool()._code)
    _crowds.append(crowd)
    crowd.reserve(140)

    def all_asleep() -> bool:
        end = time.monotonic() + 10
        while crowd._words[pool._SLEEPERS] != 140 and time.monotonic() < end:
            time.sleep(0.01)
        return bool(crowd._words[pool._SLEEPERS] == 140)

    assert all_asleep()
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda frame: None)
    address = ctypes.cast(body, ctypes.c_void_p).value
    crowd._code.function("run", ["ptr", "ptr", "ptr", "i64"])(crowd.address, address, 0, 140)
    assert all_asleep()


@pytest.mark.parametrize(
    ("environment", "spins"),
    [
        ({}, True),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, False),
        ({"OMP_WAIT_POLICY": "active"}, True),
        ({"GOMP_SPINCOUNT": "0"}, False),
    ],
)
def test_whose_threads_are_used(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], spins: bool) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert pool._torch_threads_spin() == spins
