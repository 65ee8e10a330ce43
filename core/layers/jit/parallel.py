"""Threads for generated code: the OpenMP pool that torch already runs, so that the two never compete for cores.

A parallel kernel is a body that every thread runs with (thread, threads) and the kernel's arguments. Bodies take their
work from a shared counter (`Team.next_item`), so a thread that the system disturbs does less of it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from .builder import I32, I64, PARAM, PTR, Buffer, Function, Module, Val

logger = logging.getLogger(__name__)

_SYMBOLS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
# Names under which LLVM knows the functions: private, as LLVM's symbol table is shared by the whole process.
_PREFIX = "hotswap_"
# The shared counter has a cache line of its own: 64-bit words of padding before it.
_PADDING = 8


@functools.cache
def openmp_available() -> bool:
    """Whether torch's OpenMP pool was found; if so, its functions are made known to LLVM.

    The functions are looked up through libtorch_cpu, hence are those of the very library that torch itself calls,
    whichever other OpenMP runtimes the process has loaded. Without them kernels run on the calling thread.
    """
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = folder / name
        if not path.exists():
            continue
        library = ctypes.CDLL(str(path))
        addresses = {}
        for symbol in _SYMBOLS:
            function = getattr(library, symbol, None)
            if function is not None:
                addresses[symbol] = ctypes.cast(function, ctypes.c_void_p).value
        if len(addresses) == len(_SYMBOLS):
            for symbol, address in addresses.items():
                llvm.add_symbol(_PREFIX + symbol, address)
            return True
    logger.warning("torch's OpenMP runtime offers no GOMP_parallel here: hotswap's CPU kernels run on one thread")
    return False


@dataclass
class Team:
    """What a parallel body knows: its arguments, its index, how many threads there are, and the shared counter."""

    fn: Function
    arg: dict[str, Val]
    thread: Val
    threads: Val
    counter: Val

    def buffer(self, name: str, dtype: str) -> Buffer:
        return Buffer(self.fn, self.arg[name], dtype)

    @contextmanager
    def items(self, count: Val | int) -> Iterator[Val]:
        """Runs the body once for each item 0 .. count-1, each on whichever thread is free next."""
        fn = self.fn
        with fn.forever() as done:
            item = Val(fn, fn.b.atomic_rmw("add", self.counter.ir, ir.Constant(I64, 1), "monotonic"))
            fn.break_if(item.ge(count), done)
            yield item


@contextmanager
def parallel_function(module: Module, name: str, params: Sequence[tuple[str, str]]) -> Iterator[Team]:
    """Defines the exported function `name(params..., threads: i64)`; the block builds what each thread runs.

    With threads <= 1, or without OpenMP, the body runs on the caller's thread only.
    """
    packed = ir.LiteralStructType([PARAM[kind] for _, kind in params])
    frame = ir.LiteralStructType([packed, ir.ArrayType(I64, _PADDING), I64, ir.ArrayType(I64, _PADDING)])
    body = module.function(f"{name}.body", [("frame", "ptr"), ("thread", "i64"), ("threads", "i64")])
    pointer = body.arg["frame"].ir

    def member(fn: Function, base: object, *path: int) -> object:
        return fn.b.gep(base, [ir.Constant(I32, i) for i in (0, *path)], source_etype=frame)

    arg = {
        label: Val(body, body.b.load(member(body, pointer, 0, i), typ=PARAM[kind]))
        for i, (label, kind) in enumerate(params)
    }
    counter = Val(body, member(body, pointer, 2))
    yield Team(body, arg, body.arg["thread"], body.arg["threads"], counter)
    body.finish()

    entry = module.function(name, [*params, ("threads", "i64")], internal=False)
    slot = entry.stack_slot(frame, align=64)
    for i, (label, _) in enumerate(params):
        entry.b.store(entry.arg[label].ir, member(entry, slot, 0, i))
    entry.b.store(ir.Constant(I64, 0), member(entry, slot, 2))
    _fork(module, entry, body, Val(entry, slot))
    entry.finish()


def _fork(module: Module, entry: Function, body: Function, frame: Val) -> None:
    threads = entry.arg["threads"]
    if not openmp_available():
        entry.call(body, frame, entry.i64(0), entry.i64(1))
        return
    outlined = module.function(f"{body.ir.name}.outlined", [("frame", "ptr")])
    number = module.declare(_PREFIX + "omp_get_thread_num", I32, [])
    count = module.declare(_PREFIX + "omp_get_num_threads", I32, [])
    thread = Val(outlined, outlined.b.call(number, [])).to_i64()
    outlined.call(body, outlined.arg["frame"], thread, Val(outlined, outlined.b.call(count, [])).to_i64())
    outlined.finish()
    fork = module.declare(_PREFIX + "GOMP_parallel", ir.VoidType(), [PTR, PTR, I32, I32])
    with entry.when_else(threads.le(1)) as (alone, together):
        with alone:
            entry.call(body, frame, entry.i64(0), entry.i64(1))
        with together:
            entry.b.call(fork, [outlined.ir, frame.ir, threads.to_i32().ir, ir.Constant(I32, 0)])
