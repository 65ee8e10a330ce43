"""Kernels that run on several threads: a body that takes items from a shared counter until none is left.

Threads that are disturbed take fewer items, and `pool` says which threads take part, which may be the caller's alone.
So a body must compute each item the same way whoever does it, and items must not depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from . import pool
from .builder import Buffer, Function, Module
from .values import I32, I64, PARAM, PTR, Val

# The shared counter has cache lines of its own: 64-bit words of padding around it.
_PADDING = 16


@dataclass
class Team:
    """What a parallel body knows: the kernel's arguments and the shared counter."""

    fn: Function
    arg: dict[str, Val]
    counter: Buffer

    def buffer(self, name: str, dtype: str) -> Buffer:
        """The pointer argument `name` as a buffer."""
        return Buffer(self.fn, self.arg[name], dtype)

    @contextmanager
    def items(self, count: Val | int) -> Iterator[Val]:
        """Runs the block once for each item 0 .. count - 1, each on whichever thread is free next."""
        with self.fn.forever() as done:
            item = self.counter.atomic("add", 1, ordering="monotonic")
            self.fn.break_if(item.ge(count), done)
            yield item


@contextmanager
def parallel_function(module: Module, name: str, params: Sequence[tuple[str, str]]) -> Iterator[Team]:
    """Defines the exported function `name(params..., threads: i64)`; the block builds what each thread runs.

    At most `threads` threads take part; with 1 the body runs on the caller's thread only.
    """
    packed = ir.LiteralStructType([PARAM[kind] for _, kind in params])
    padding = ir.ArrayType(I64, _PADDING)
    frame = ir.LiteralStructType([packed, padding, I64, padding])

    def member(fn: Function, base: Any, *path: int) -> Any:
        return fn.b.gep(base, [ir.Constant(I32, i) for i in (0, *path)], source_etype=frame)

    body = module.function(f"{name}.body", [("frame", "ptr")])
    pointer = body.arg["frame"].ir
    arg = {
        label: Val(body, body.b.load(member(body, pointer, 0, i), typ=PARAM[kind]))
        for i, (label, kind) in enumerate(params)
    }
    yield Team(body, arg, Buffer(body, Val(body, member(body, pointer, 2)), "i64"))
    body.finish()

    entry = module.function(name, [*params, ("threads", "i64")], internal=False)
    slot = entry.stack_slot(frame, align=64)
    for i, (label, _) in enumerate(params):
        entry.b.store(entry.arg[label].ir, member(entry, slot, 0, i))
    entry.b.store(ir.Constant(I64, 0), member(entry, slot, 2))
    threads = entry.arg["threads"]
    with entry.when_else(threads.le(1)) as (alone, together):
        with alone:
            entry.call(body, Val(entry, slot))
        with together:
            symbol = pool.run_symbol()
            memory = pool.thread_pool().address if symbol == pool.POOL_RUN else 0
            run = module.declare(symbol, ir.VoidType(), [PTR, PTR, PTR, I64])
            memory_pointer = entry.b.inttoptr(ir.Constant(I64, memory), PTR)
            entry.b.call(run, [memory_pointer, body.ir, slot, (threads - 1).ir])
    entry.finish()
