"""The threads of generated code: helpers that join the caller's work while there is some, and are not waited for else.

A job is a function that takes items from a counter until none is left. The caller runs it too. When it finds no more
items it closes the job and waits only for helpers that are inside, that is, in the middle of an item. A helper that the
system has not woken, or has taken off its core, is not inside: the job is then done by the others. (An OpenMP region
ends when every thread has taken part; measured with other programs on the same two cores, that makes a call of 0.05 ms
last 4 to 28 ms.) A helper that finds nothing to do spins for about 0.1 ms, longer than the pause between two layers,
then sleeps.

The state of a job is one word: generation << 16 | open << 15 | helpers inside. A helper enters by compare-and-exchange
of the whole word, so it can only enter the job whose function and arguments it then reads.

Torch has threads of its own, of OpenMP. Where those spin for milliseconds after each torch operation (GNU OpenMP's way
unless OMP_WAIT_POLICY is "passive" when torch is loaded) they would take the cores from these helpers; jobs then run as
OpenMP regions on torch's threads instead. So an engine process should be started with OMP_WAIT_POLICY=passive.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from .builder import Buffer, Function, Module
from .compiler import CompiledModule, compile_module
from .target import Target, host_target
from .values import I32, I64, PTR, Val

# The functions `run` by the names under which LLVM knows them.
POOL_RUN = "hotswap_pool_run"
OPENMP_RUN = "hotswap_openmp_run"

# Words of the pool's memory; those that different threads write lie on different cache lines.
_STATE, _SLEEPERS, _OWNER = 0, 16, 32
_BODY, _FRAME, _LIMIT, _READ_FD, _WRITE_FD = 48, 49, 50, 51, 52
_WORDS = 64
_OPEN = 1 << 15
_INSIDE = _OPEN - 1
_SPINS = 3000
_SPINS_BEFORE_YIELD = 1000
_RUN_PARAMS = [("pool", "ptr"), ("body", "ptr"), ("frame", "ptr"), ("helpers", "i64")]


def _call(fn: Function, name: str, result: object, params: list[object], args: list[object]) -> object:
    return fn.b.call(fn.module.declare(name, result, params), args)


def _build_run(module: Module) -> None:
    """`run(pool, body, frame, helpers)`: body(frame) here and on at most `helpers` other threads; returns when done."""
    fn = module.function("run", _RUN_PARAMS, internal=False)
    pool = fn.buffer("pool", "i64")
    body, frame, helpers = fn.arg["body"], fn.arg["frame"], fn.arg["helpers"]
    # One job at a time: a second thread that calls a kernel meanwhile works alone.
    mine = fn.var(I64, 0)
    with fn.when(helpers.gt(0)):
        mine.set(1 - pool.atomic("xchg", 1, _OWNER))
    with fn.when_else(mine.get().eq(0)) as (alone, together):
        with alone:
            fn.call_pointer(body, frame)
        with together:
            Buffer(fn, pool.at(_BODY).pointer, "ptr").store(body)
            Buffer(fn, pool.at(_FRAME).pointer, "ptr").store(frame)
            pool.store(helpers, _LIMIT)
            generation = (pool.atomic_load(_STATE) >> 16) + 1
            pool.atomic("xchg", (generation << 16) | _OPEN, _STATE)
            with fn.when(pool.atomic_load(_SLEEPERS, "seq_cst").gt(0)):
                owed = fn.var(I64, pool.atomic("xchg", 0, _SLEEPERS))
                message = fn.stack_buffer("i64", 16)
                fd = pool.load(_WRITE_FD).to_i32()
                with fn.forever() as paid:
                    count = owed.get().minimum(128)
                    _call(fn, "write", I64, [I32, PTR, I64], [fd.ir, message.pointer.ir, count.ir])
                    owed.set(owed.get() - count)
                    fn.break_if(owed.get().eq(0), paid)
            fn.call_pointer(body, frame)
            pool.atomic("and", ~_OPEN, _STATE)
            spins = fn.var(I64, 0)
            with fn.forever() as done:
                fn.break_if((pool.atomic_load(_STATE) & _INSIDE).eq(0), done)
                fn.pause()
                spins.set(spins.get() + 1)
                with fn.when((spins.get() % _SPINS_BEFORE_YIELD).eq(0)):
                    _call(fn, "sched_yield", I32, [], [])
            pool.atomic("xchg", 0, _OWNER)
    fn.finish()


def _build_help(module: Module) -> None:
    """`help(pool)`: the life of a helper thread. Never returns."""
    fn = module.function("help", [("pool", "ptr")], internal=False)
    pool = fn.buffer("pool", "i64")
    joined, idle = fn.var(I64, 0), fn.var(I64, 0)

    def joinable(state: Val) -> Val:
        return (state & _OPEN).ne(0) & (state >> 16).ne(joined.get())

    with fn.forever():
        state = pool.atomic_load(_STATE)
        with fn.when_else(joinable(state) & (state & _INSIDE).lt(pool.load(_LIMIT))) as (join, rest):
            with join, fn.when(pool.compare_exchange(state, state + 1, _STATE)):
                body = Buffer(fn, pool.at(_BODY).pointer, "ptr").load(0)
                fn.call_pointer(body, Buffer(fn, pool.at(_FRAME).pointer, "ptr").load(0))
                joined.set(state >> 16)
                idle.set(0)
                pool.atomic("sub", 1, _STATE)
            with rest:
                fn.pause()
                idle.set(idle.get() + 1)
                with fn.when(idle.get().gt(_SPINS)):
                    idle.set(0)
                    _build_sleep(fn, pool, joinable)
    fn.b.unreachable()


def _build_sleep(fn: Function, pool: Buffer, joinable: Callable[[Val], Val]) -> None:
    """Announces a sleeper, looks once more, and blocks. Whoever takes the announcement away owes the sleeper a byte."""
    pool.atomic("add", 1, _SLEEPERS)
    owed = fn.var(I64, 1)
    with fn.when(joinable(pool.atomic_load(_STATE, "seq_cst"))), fn.forever() as settled:
        sleepers = pool.atomic_load(_SLEEPERS)
        fn.break_if(sleepers.eq(0), settled)
        taken_back = pool.compare_exchange(sleepers, sleepers - 1, _SLEEPERS)
        with fn.when(taken_back):
            owed.set(0)
        fn.break_if(taken_back, settled)
    with fn.when(owed.get().ne(0)):
        byte = fn.stack_buffer("i64", 1)
        fd = pool.load(_READ_FD).to_i32()
        _call(fn, "read", I64, [I32, PTR, I64], [fd.ir, byte.pointer.ir, ir.Constant(I64, 1)])


def build_pool(target: Target) -> Module:
    """The module with `run` and `help`."""
    module = Module("thread_pool", target)
    _build_run(module)
    _build_help(module)
    return module


class ThreadPool:
    """The helper threads of this process and the memory through which they are given work."""

    def __init__(self, code: CompiledModule) -> None:
        self._code = code
        self._help = code.function("help", ["ptr"])
        raw = (ctypes.c_int64 * (_WORDS + 16))()
        self._raw = raw
        self.address = -(-ctypes.addressof(raw) // 128) * 128
        self._words = (ctypes.c_int64 * _WORDS).from_address(self.address)
        self._lock = threading.Lock()
        self.helpers = 0

    def reserve(self, helpers: int) -> None:
        """Starts helper threads until there are `helpers`. They are daemons and hold the GIL only while they start."""
        with self._lock:
            if self.helpers == 0 and helpers > 0:
                self._words[_READ_FD], self._words[_WRITE_FD] = os.pipe()
            while self.helpers < helpers:
                name = f"hotswap-kernel-{self.helpers + 1}"
                threading.Thread(target=self._help, args=(self.address,), name=name, daemon=True).start()
                self.helpers += 1

    def forget(self) -> None:
        """After a fork, in the child: the helpers are the parent's, and the memory may show one of its jobs."""
        ctypes.memset(self.address, 0, 8 * _WORDS)
        self._lock = threading.Lock()
        self.helpers = 0


@functools.cache
def thread_pool() -> ThreadPool:
    """The pool of this process; its `run` is known to LLVM under the name POOL_RUN from then on."""
    target = host_target()
    code = compile_module(lambda: build_pool(target))
    llvm.add_symbol(POOL_RUN, code.address("run"))
    pool = ThreadPool(code)
    os.register_at_fork(after_in_child=pool.forget)
    return pool


def build_openmp(target: Target, gomp_parallel: int) -> Module:
    """The module with a `run` that makes the job an OpenMP region of helpers + 1 threads."""
    module = Module("openmp_run", target)
    fn = module.function("run", _RUN_PARAMS, internal=False)
    region = Val(fn, ir.Constant(I64, gomp_parallel))
    threads = (fn.arg["helpers"] + 1).to_i32()
    fn.call_pointer(region, fn.arg["body"], fn.arg["frame"], threads, Val(fn, ir.Constant(I32, 0)))
    fn.finish()
    return module


def _gomp_parallel() -> int | None:
    """Address of the GOMP_parallel that torch itself calls, whichever other OpenMP runtimes the process has loaded."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not path.exists():
        return None
    function = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


def _torch_threads_spin() -> bool:
    return os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive" and os.environ.get("GOMP_SPINCOUNT") != "0"


@functools.cache
def run_symbol() -> str:
    """The `run` for this process, known to LLVM under the name that is returned: see the top of this module."""
    address = _gomp_parallel() if _torch_threads_spin() else None
    if address is None:
        thread_pool()
        return POOL_RUN
    code = compile_module(lambda: build_openmp(host_target(), address))
    llvm.add_symbol(OPENMP_RUN, code.address("run"))
    _alive.append(code)
    return OPENMP_RUN


_alive: list[CompiledModule] = []


def team_size(threads: int | None = None) -> int:
    """How many threads a kernel shall use: `threads`, or torch's setting. Makes sure that there are so many."""
    count = torch.get_num_threads() if threads is None else threads
    if count > 1 and run_symbol() == POOL_RUN:
        pool = thread_pool()
        if count - 1 > pool.helpers:
            pool.reserve(count - 1)
    return count
