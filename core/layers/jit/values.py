"""Values of the kernel language: SSA values with operators, and the types that they have."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from .builder import Function

F32 = ir.FloatType()
I1 = ir.IntType(1)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
PTR = ir.PointerType()

ELEMENT = {"f32": F32, "bf16": I16, "i32": I32, "i64": I64, "ptr": PTR}
SIZE = {"f32": 4, "bf16": 2, "i32": 4, "i64": 8, "ptr": 8}
PARAM = {"ptr": PTR, "i64": I64, "i32": I32, "f32": F32}

Number = int | float


def vector(element: Any, lanes: int) -> Any:
    """The IR type of `lanes` elements: the element type itself for one lane."""
    return element if lanes == 1 else ir.VectorType(element, lanes)


def lanes_of(type_: Any) -> int:
    """The number of lanes of an IR type, 1 for a scalar."""
    return int(type_.count) if isinstance(type_, ir.VectorType) else 1


def constant(type_: Any, value: Number) -> Any:
    lanes = lanes_of(type_)
    element = type_.element if lanes > 1 else type_
    if element is F32 or isinstance(element, ir.FloatType):
        # llvmlite prints the double that is written; round it to float32 so that the literal is valid for `float`.
        scalar = ir.Constant(F32, struct.unpack("f", struct.pack("f", value))[0])
    else:
        scalar = ir.Constant(element, int(value))
    return scalar if lanes == 1 else ir.Constant(type_, [scalar] * lanes)


class Val:
    """An SSA value with operators. Integers are signed; Python numbers are converted to the other operand's type."""

    __slots__ = ("fn", "ir")

    def __init__(self, fn: Function, value: Any) -> None:
        self.fn = fn
        self.ir = value

    @property
    def type(self) -> Any:
        return self.ir.type

    @property
    def lanes(self) -> int:
        return lanes_of(self.ir.type)

    @property
    def is_float(self) -> bool:
        type_ = self.ir.type
        return isinstance(type_.element if isinstance(type_, ir.VectorType) else type_, ir.FloatType)

    def _other(self, other: Val | Number) -> Any:
        return other.ir if isinstance(other, Val) else constant(self.ir.type, other)

    def _arith(self, name: str, other: Val | Number, *, swap: bool = False) -> Val:
        a, b = self.ir, self._other(other)
        if swap:
            a, b = b, a
        return Val(self.fn, getattr(self.fn.b, ("f" if self.is_float else "") + name)(a, b))

    def __add__(self, other: Val | Number) -> Val:
        return self._arith("add", other)

    __radd__ = __add__

    def __sub__(self, other: Val | Number) -> Val:
        return self._arith("sub", other)

    def __rsub__(self, other: Val | Number) -> Val:
        return self._arith("sub", other, swap=True)

    def __mul__(self, other: Val | Number) -> Val:
        return self._arith("mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Val | Number) -> Val:
        return Val(self.fn, self.fn.b.fdiv(self.ir, self._other(other)))

    def __rtruediv__(self, other: Number) -> Val:
        return Val(self.fn, self.fn.b.fdiv(self._other(other), self.ir))

    def __floordiv__(self, other: Val | Number) -> Val:
        """Division of non-negative integers."""
        return Val(self.fn, self.fn.b.udiv(self.ir, self._other(other)))

    def __mod__(self, other: Val | Number) -> Val:
        """Remainder of non-negative integers."""
        return Val(self.fn, self.fn.b.urem(self.ir, self._other(other)))

    def __lshift__(self, other: Val | Number) -> Val:
        return Val(self.fn, self.fn.b.shl(self.ir, self._other(other)))

    def __rshift__(self, other: Val | Number) -> Val:
        """Logical shift."""
        return Val(self.fn, self.fn.b.lshr(self.ir, self._other(other)))

    def __and__(self, other: Val | Number) -> Val:
        return Val(self.fn, self.fn.b.and_(self.ir, self._other(other)))

    def __or__(self, other: Val | Number) -> Val:
        return Val(self.fn, self.fn.b.or_(self.ir, self._other(other)))

    def __neg__(self) -> Val:
        return Val(self.fn, self.fn.b.fneg(self.ir) if self.is_float else self.fn.b.neg(self.ir))

    def _compare(self, op: str, other: Val | Number) -> Val:
        compare = self.fn.b.fcmp_ordered if self.is_float else self.fn.b.icmp_signed
        return Val(self.fn, compare(op, self.ir, self._other(other)))

    def lt(self, other: Val | Number) -> Val:
        return self._compare("<", other)

    def le(self, other: Val | Number) -> Val:
        return self._compare("<=", other)

    def gt(self, other: Val | Number) -> Val:
        return self._compare(">", other)

    def ge(self, other: Val | Number) -> Val:
        return self._compare(">=", other)

    def eq(self, other: Val | Number) -> Val:
        return self._compare("==", other)

    def ne(self, other: Val | Number) -> Val:
        return self._compare("!=", other)

    def is_nan(self) -> Val:
        return Val(self.fn, self.fn.b.fcmp_unordered("uno", self.ir, self.ir))

    def select(self, yes: Val | Number, no: Val | Number) -> Val:
        """`yes` where this condition holds, else `no`; at least one of the two must be a Val."""
        sample = yes if isinstance(yes, Val) else no
        if not isinstance(sample, Val):
            raise TypeError("select needs a Val on at least one side to know the type")
        return Val(self.fn, self.fn.b.select(self.ir, sample._other(yes), sample._other(no)))

    def minimum(self, other: Val | Number) -> Val:
        """The smaller one; where the comparison is unordered (NaN), this value."""
        return self.gt(other).select(other, self)

    def maximum(self, other: Val | Number) -> Val:
        """The larger one; where the comparison is unordered (NaN), this value."""
        return self.lt(other).select(other, self)

    def splat(self, lanes: int) -> Val:
        """This scalar in every lane."""
        if lanes == 1:
            return self
        b = self.fn.b
        undefined = ir.Constant(ir.VectorType(self.ir.type, lanes), ir.Undefined)
        first = b.insert_element(undefined, self.ir, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return Val(self.fn, b.shuffle_vector(first, undefined, zeros))

    def lane(self, index: int) -> Val:
        """One lane as a scalar."""
        return self if self.lanes == 1 else Val(self.fn, self.fn.b.extract_element(self.ir, ir.Constant(I32, index)))

    def shuffle(self, other: Val, mask: Sequence[int]) -> Val:
        """Lanes of this vector followed by `other`, picked by `mask`."""
        picked = ir.Constant(ir.VectorType(I32, len(mask)), list(mask))
        return Val(self.fn, self.fn.b.shuffle_vector(self.ir, other.ir, picked))

    def bits(self) -> Val:
        """A float's bits as int32, lane by lane."""
        return Val(self.fn, self.fn.b.bitcast(self.ir, vector(I32, self.lanes)))

    def as_float(self) -> Val:
        """int32 bits as a float, lane by lane."""
        return Val(self.fn, self.fn.b.bitcast(self.ir, vector(F32, self.lanes)))

    def to_i64(self) -> Val:
        """Sign-extended to 64 bits."""
        return self if self.ir.type == I64 else Val(self.fn, self.fn.b.sext(self.ir, vector(I64, self.lanes)))

    def to_i32(self) -> Val:
        return Val(self.fn, self.fn.b.trunc(self.ir, vector(I32, self.lanes)))

    def to_f32(self) -> Val:
        """A signed integer's value as float32."""
        return Val(self.fn, self.fn.b.sitofp(self.ir, vector(F32, self.lanes)))
