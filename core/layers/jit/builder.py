"""A small language for kernels on top of llvmlite: typed values with operators, buffers, loops, variables.

A kernel is a Python function that builds code: Python loops and conditions run while building (they unroll and
specialise), `Function.loop` and `Function.when` run in the kernel. Element types are named "f32", "bf16", "i32", "i64"
and "ptr". bfloat16 exists in memory only: `Buffer.load` widens it to float32 and `Buffer.store` rounds to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from .target import Target
from .values import ELEMENT, F32, I16, I32, I64, PARAM, PTR, SIZE, Number, Val, constant, vector


class Var:
    """A mutable local. It becomes registers and phi nodes when the module is optimised."""

    def __init__(self, fn: Function, type_: Any, initial: Val | Number | None = None) -> None:
        self.fn = fn
        self.type = type_
        self._slot = fn.stack_slot(type_)
        if initial is not None:
            self.set(initial)

    def get(self) -> Val:
        return Val(self.fn, self.fn.b.load(self._slot, typ=self.type))

    def set(self, value: Val | Number) -> None:
        self.fn.b.store(value.ir if isinstance(value, Val) else constant(self.type, value), self._slot)


class Buffer:
    """A pointer with an element type. Indices and offsets are in elements."""

    __slots__ = ("dtype", "fn", "pointer")

    def __init__(self, fn: Function, pointer: Val, dtype: str) -> None:
        self.fn = fn
        self.pointer = pointer
        self.dtype = dtype

    def at(self, index: Val | int) -> Buffer:
        """The same buffer, `index` elements further."""
        if isinstance(index, int) and index == 0:
            return self
        offset = index.ir if isinstance(index, Val) else ir.Constant(I64, index)
        moved = self.fn.b.gep(self.pointer.ir, [offset], source_etype=ELEMENT[self.dtype])
        return Buffer(self.fn, Val(self.fn, moved), self.dtype)

    def raw(self, index: Val | int = 0, lanes: int = 1, element: Any = None) -> Val:
        """The stored bits (bf16: int16; or read as `element`), unconverted. Needs only the element's alignment."""
        b = self.fn.b
        type_ = vector(element or ELEMENT[self.dtype], lanes)
        return Val(self.fn, b.load(self.at(index).pointer.ir, align=SIZE[self.dtype], typ=type_))

    def load(self, index: Val | int = 0, lanes: int = 1) -> Val:
        """Elements as float32 (bf16 widened), int32 or int64."""
        value = self.raw(index, lanes)
        if self.dtype != "bf16":
            return value
        widened = Val(self.fn, self.fn.b.zext(value.ir, vector(I32, lanes)))
        return (widened << 16).as_float()

    def load_buffer(self, index: Val | int, dtype: str) -> Buffer:
        """The pointer stored at `index` of a "ptr" buffer, as a buffer of `dtype`."""
        return Buffer(self.fn, self.raw(index), dtype)

    def load_pair(self, index: Val | int, lanes: int) -> tuple[Val, Val]:
        """`2 * lanes` consecutive elements as two float32 vectors, in the order that is cheapest to load.

        f32: the first and the second half. bf16: the even and the odd elements (one load, a shift and a mask; `zext`
        would need cross-lane shuffles). `unpair` restores the order.
        """
        if self.dtype == "f32":
            return self.load(index, lanes), self.at(index).load(lanes, lanes)
        both = self.raw(index, lanes, I32)
        return (both << 16).as_float(), (both & -65536).as_float()

    def store(self, value: Val, index: Val | int = 0) -> None:
        """Stores float32 (rounded to nearest even for bf16) or integer lanes."""
        if self.dtype == "bf16":
            value = round_to_bf16(value)
        self.fn.b.store(value.ir, self.at(index).pointer.ir, align=SIZE[self.dtype])

    def copy(self, source: Buffer) -> None:
        """Copies one element of the same type, unconverted."""
        self.fn.b.store(source.raw().ir, self.pointer.ir, align=SIZE[self.dtype])

    def atomic_load(self, index: int = 0, ordering: str = "acquire") -> Val:
        """An int64, atomically."""
        pointer = self.at(index).pointer.ir
        return Val(self.fn, self.fn.b.load_atomic(pointer, ordering, 8, typ=ELEMENT[self.dtype]))

    def atomic(self, op: str, value: Val | int, index: int = 0, ordering: str = "seq_cst") -> Val:
        """Replaces an int64 by its `op` ("add", "sub", "and", "xchg") with `value`; returns what was there before."""
        operand = value.ir if isinstance(value, Val) else ir.Constant(I64, value)
        return Val(self.fn, self.fn.b.atomic_rmw(op, self.at(index).pointer.ir, operand, ordering))

    def compare_exchange(self, expected: Val, value: Val, index: int = 0) -> Val:
        """Stores `value` if an int64 is `expected`, atomically; whether it was."""
        b = self.fn.b
        outcome = b.cmpxchg(self.at(index).pointer.ir, expected.ir, value.ir, "seq_cst")
        return Val(self.fn, b.extract_value(outcome, 1))

    def is_set(self) -> Val:
        """Whether the pointer is not null."""
        b = self.fn.b
        return Val(self.fn, b.icmp_unsigned("!=", b.ptrtoint(self.pointer.ir, I64), ir.Constant(I64, 0)))

    def prefetch(self, index: Val | int = 0) -> None:
        """Asks for the cache line of an element that will be read; any address is safe."""
        self.fn.module.prefetch(self.fn, self.at(index).pointer)


def unpair(dtype: str, first: Val, second: Val) -> tuple[Val, Val]:
    """Two vectors in `Buffer.load_pair` order back in memory order."""
    if dtype == "f32":
        return first, second
    lanes = first.lanes
    order = [lane // 2 + lanes * (lane % 2) for lane in range(2 * lanes)]
    return first.shuffle(second, order[:lanes]), first.shuffle(second, order[lanes:])


def pair_position(dtype: str, lanes: int, element: int) -> int:
    """Where an element of `2 * lanes` ends up when the two vectors of `load_pair` are stored one after the other."""
    return element if dtype == "f32" else element // 2 + lanes * (element % 2)


def _rounded_bits(value: Val) -> Val:
    """The bfloat16 bits nearest to float32 lanes, ties to even, in the low half of int32; every NaN is 0x7fc0."""
    bits = value.bits()
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return value.is_nan().select(0x7FC0, rounded)


def round_to_bf16(value: Val) -> Val:
    """float32 lanes to bfloat16 bits (int16), to nearest even; every NaN becomes the quiet NaN 0x7fc0."""
    fn = value.fn
    return Val(fn, fn.b.trunc(_rounded_bits(value).ir, vector(I16, value.lanes)))


def through_bf16(value: Val) -> Val:
    """float32 lanes rounded to bfloat16 and widened again."""
    return (_rounded_bits(value) << 16).as_float()


class Module:
    """An LLVM module being built for one target."""

    def __init__(self, name: str, target: Target) -> None:
        self.name = name
        self.target = target
        self.ir = ir.Module(name=name)
        self.ir.triple = target.triple
        self._declared: dict[str, Any] = {}

    def declare(self, name: str, result: Any, params: Sequence[Any]) -> Any:
        """An external function or intrinsic, declared once."""
        if name not in self._declared:
            self._declared[name] = ir.Function(self.ir, ir.FunctionType(result, list(params)), name=name)
        return self._declared[name]

    def table(self, fn: Function, values: Sequence[int]) -> Buffer:
        """A constant table of int64, to be read by `fn`."""
        content = ir.Constant(ir.ArrayType(I64, len(values)), list(values))
        variable = ir.GlobalVariable(self.ir, content.type, name=self.ir.get_unique_name("table"))
        variable.initializer = content
        variable.global_constant = True
        variable.linkage = "internal"
        variable.type = PTR
        return Buffer(fn, Val(fn, variable), "i64")

    def prefetch(self, fn: Function, pointer: Val) -> None:
        declared = self.declare("llvm.prefetch.p0", ir.VoidType(), [PTR, I32, I32, I32])
        fn.b.call(declared, [pointer.ir, ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])

    def function(self, name: str, params: Sequence[tuple[str, str]], *, internal: bool = True) -> Function:
        """A new void function; `params` are (name, "ptr" | "i64" | "i32" | "f32")."""
        return Function(self, name, params, internal=internal)


class Function:
    """A function being built. `arg[name]` are its arguments; everything emitted goes to the current position."""

    def __init__(self, module: Module, name: str, params: Sequence[tuple[str, str]], *, internal: bool) -> None:
        self.module = module
        self.target = module.target
        type_ = ir.FunctionType(ir.VoidType(), [PARAM[kind] for _, kind in params])
        self.ir = ir.Function(module.ir, type_, name=name)
        if internal:
            self.ir.linkage = "internal"
            self.ir.attributes.add("noinline")
        self.ir.attributes.add("nounwind")
        # Locals go to `entry`, which ends in a jump to the first block of code; see `stack_slot`.
        self._entry = self.ir.append_basic_block("entry")
        start = self.ir.append_basic_block("start")
        self._entry_jump = ir.IRBuilder(self._entry).branch(start)
        self.b = ir.IRBuilder(start)
        self.arg: dict[str, Val] = {}
        for (label, _), value in zip(params, self.ir.args, strict=True):
            self.arg[label] = Val(self, value)

    def finish(self) -> None:
        """Ends the function with a return."""
        self.b.ret_void()

    def stack_slot(self, type_: Any, align: int | None = None) -> Any:
        """Stack memory of one `type_`, allocated once per call of the function wherever this is emitted."""
        builder = ir.IRBuilder(self._entry)
        builder.position_before(self._entry_jump)
        slot = builder.alloca(type_)
        slot.align = align
        slot.type = PTR  # llvmlite would check stores against the allocated type; LLVM's pointers have none
        return slot

    def stack_buffer(self, dtype: str, count: int) -> Buffer:
        """Uninitialised stack memory of `count` elements, aligned to a cache line."""
        slot = self.stack_slot(ir.ArrayType(ELEMENT[dtype], count), align=64)
        return Buffer(self, Val(self, slot), dtype)

    def var(self, type_: Any, initial: Val | Number | None = None) -> Var:
        return Var(self, type_, initial)

    def zeros(self, lanes: int) -> Var:
        """A float32 accumulator, zero."""
        return Var(self, vector(F32, lanes), 0.0)

    def i64(self, value: int) -> Val:
        return Val(self, ir.Constant(I64, value))

    def f32(self, value: float, lanes: int = 1) -> Val:
        return Val(self, constant(vector(F32, lanes), value))

    def lane_indices(self, lanes: int, element: Any = I32) -> Val:
        """0, 1, 2, ... as an integer vector."""
        if lanes == 1:
            return Val(self, ir.Constant(element, 0))
        return Val(self, ir.Constant(ir.VectorType(element, lanes), list(range(lanes))))

    def int_vector(self, values: Sequence[int]) -> Val:
        """A constant int32 vector (a scalar for one value)."""
        if len(values) == 1:
            return Val(self, ir.Constant(I32, values[0]))
        return Val(self, ir.Constant(ir.VectorType(I32, len(values)), list(values)))

    def buffer(self, name: str, dtype: str) -> Buffer:
        """The pointer argument `name` as a buffer."""
        return Buffer(self, self.arg[name], dtype)

    def fma(self, a: Val, b: Val, c: Val) -> Val:
        """a * b + c, with one rounding where the target has the instruction, else two; the same all over a target."""
        if not self.target.has_fma:
            return a * b + c
        lanes = a.lanes
        name = "llvm.fma.f32" if lanes == 1 else f"llvm.fma.v{lanes}f32"
        declared = self.module.declare(name, a.type, [a.type] * 3)
        return Val(self, self.b.call(declared, [a.ir, b.ir, c.ir]))

    def choose(self, condition: Val, yes: Buffer, no: Buffer) -> Buffer:
        """One of two buffers of the same element type."""
        return Buffer(self, Val(self, self.b.select(condition.ir, yes.pointer.ir, no.pointer.ir)), yes.dtype)

    def sqrt(self, value: Val) -> Val:
        lanes = value.lanes
        name = "llvm.sqrt.f32" if lanes == 1 else f"llvm.sqrt.v{lanes}f32"
        return Val(self, self.b.call(self.module.declare(name, value.type, [value.type]), [value.ir]))

    def sum_lanes(self, value: Val) -> Val:
        """Horizontal sum, halving: the order depends on the number of lanes only."""
        while value.lanes > 1:
            half = value.lanes // 2
            low = value.shuffle(value, range(half)) if half > 1 else value.lane(0)
            high = value.shuffle(value, range(half, 2 * half)) if half > 1 else value.lane(1)
            value = low + high
        return value

    def max_lanes(self, value: Val) -> Val:
        """Horizontal maximum."""
        while value.lanes > 1:
            half = value.lanes // 2
            low = value.shuffle(value, range(half)) if half > 1 else value.lane(0)
            high = value.shuffle(value, range(half, 2 * half)) if half > 1 else value.lane(1)
            value = low.maximum(high)
        return value

    def call(self, function: Function, *args: Val) -> None:
        self.b.call(function.ir, [a.ir for a in args])

    def call_pointer(self, function: Val, *args: Val) -> None:
        """Calls a void function by its address, a pointer or an int64."""
        type_ = ir.FunctionType(ir.VoidType(), [a.type for a in args])
        # Through an integer, as llvmlite drops a cast between pointers and then knows no function type.
        address = function.ir if function.type == I64 else self.b.ptrtoint(function.ir, I64)
        typed = self.b.inttoptr(address, type_.as_pointer())
        self.b.call(typed, [a.ir for a in args])

    def pause(self) -> None:
        """Tells the CPU that this is a spinning loop, where it knows such an instruction."""
        triple = self.target.triple
        if triple.startswith(("x86_64", "i686")):
            self.b.call(self.module.declare("llvm.x86.sse2.pause", ir.VoidType(), []), [])
        elif triple.startswith(("aarch64", "arm64")):
            self.b.call(self.module.declare("llvm.aarch64.hint", ir.VoidType(), [I32]), [ir.Constant(I32, 1)])

    @contextmanager
    def loop(self, start: Val | int, stop: Val | int, step: Val | int = 1) -> Iterator[Val]:
        """Runs the body for start, start + step, ... below `stop` (int64); not at all when start >= stop."""
        first = start if isinstance(start, Val) else self.i64(start)
        last = stop if isinstance(stop, Val) else self.i64(stop)
        body = self.b.append_basic_block("loop")
        after = self.b.append_basic_block("after")
        before = self.b.block
        self.b.cbranch(first.lt(last).ir, body, after)
        self.b.position_at_end(body)
        index = self.b.phi(I64)
        index.add_incoming(first.ir, before)
        yield Val(self, index)
        following = Val(self, index) + step
        index.add_incoming(following.ir, self.b.block)
        self.b.cbranch(following.lt(last).ir, body, after)
        self.b.position_at_end(after)

    @contextmanager
    def forever(self) -> Iterator[Any]:
        """An endless loop; `break_` inside it leaves through the yielded block."""
        body = self.b.append_basic_block("forever")
        after = self.b.append_basic_block("done")
        self.b.branch(body)
        self.b.position_at_end(body)
        yield after
        self.b.branch(body)
        self.b.position_at_end(after)

    def break_if(self, condition: Val, after: Any) -> None:
        """Leaves a `forever` loop when `condition` holds."""
        more = self.b.append_basic_block("more")
        self.b.cbranch(condition.ir, after, more)
        self.b.position_at_end(more)

    def switch(self, value: Val, cases: Mapping[int, Callable[[], None]]) -> None:
        """Runs the code of the case that equals `value` (int64); nothing for another value."""
        after = self.b.append_basic_block("after_switch")
        blocks = {number: self.b.append_basic_block(f"case_{number}") for number in cases}
        switch = self.b.switch(value.ir, after)
        for number, block in blocks.items():
            switch.add_case(ir.Constant(I64, number), block)
            self.b.position_at_end(block)
            cases[number]()
            self.b.branch(after)
        self.b.position_at_end(after)

    @contextmanager
    def when(self, condition: Val) -> Iterator[None]:
        with self.b.if_then(condition.ir):
            yield

    @contextmanager
    def when_else(self, condition: Val) -> Iterator[tuple[Any, Any]]:
        """`with fn.when_else(c) as (yes, no): with yes: ...; with no: ...`"""
        with self.b.if_else(condition.ir) as branches:
            yield branches
