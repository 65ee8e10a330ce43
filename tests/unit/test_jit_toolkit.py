"""The JIT toolkit: language, mathematics, rounding, and code for other machines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from hotswap.core.layers.jit import (
    Function,
    Module,
    Target,
    Val,
    assembly,
    compile_module,
    exp,
    generic_target,
    host_target,
    pair_position,
    sigmoid,
    tanh,
    unpair,
)

WIDTHS = [1, 4, 8, 16]


def target_of(width: int) -> Target:
    return dataclasses.replace(host_target(), width=width)


def map_function(expression: Callable[[Val], Val], source: str, result: str, lanes: int) -> Callable[..., None]:
    """A compiled f(x, out, n) that applies an expression to n elements, `lanes` at a time."""

    def build() -> Module:
        module = Module("map", target_of(lanes))
        fn = module.function("f", [("x", "ptr"), ("out", "ptr"), ("n", "i64")], internal=False)
        with fn.loop(0, fn.arg["n"], lanes) as index:
            fn.buffer("out", result).store(expression(fn.buffer("x", source).load(index, lanes)), index)
        fn.finish()
        return module

    code = compile_module(build)
    native = code.function("f", ["ptr", "ptr", "i64"])

    def call(x: torch.Tensor, out: torch.Tensor) -> None:
        native(x.data_ptr(), out.data_ptr(), x.numel())
        assert code  # the machine code must outlive the call

    return call


def apply(expression: Callable[[Val], Val], x: torch.Tensor, lanes: int = 8) -> torch.Tensor:
    out = torch.empty_like(x)
    map_function(expression, "f32", "f32", lanes)(x, out)
    return out


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = torch.linspace(-87.3, 88.3, 1 << 18)
    exact = torch.exp(x.double())
    unit = (torch.nextafter(exact.float(), torch.tensor(math.inf)) - exact.float()).double()
    assert ((apply(exp, x).double() - exact).abs() / unit).max() <= 2.0


@pytest.mark.parametrize("lanes", WIDTHS)
def test_exp_of_special_values(lanes: int) -> None:
    x = torch.tensor(
        [0.0, -0.0, -math.inf, math.inf, math.nan, -200.0, 200.0, -87.4, 1.0, -1e30, 1e30, 88.7, -1.0, 2.0, 3.0, 4.0]
    )
    y = apply(exp, x, lanes)
    assert y[0] == 1.0 and y[1] == 1.0
    assert y[2] == 0.0 and y[5] == 0.0 and y[7] == 0.0 and y[9] == 0.0
    assert y[3] == math.inf and y[6] == math.inf and y[10] == math.inf and y[11] == math.inf
    assert y[4].isnan()


def test_exp_has_the_same_bits_for_every_vector_width() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 20
    results = [apply(exp, x, lanes) for lanes in WIDTHS]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_sigmoid_and_tanh() -> None:
    x = torch.linspace(-100, 100, 1 << 16)
    torch.testing.assert_close(apply(sigmoid, x).double(), torch.sigmoid(x.double()), rtol=4e-7, atol=1e-37)
    torch.testing.assert_close(apply(tanh, x).double(), torch.tanh(x.double()), rtol=0, atol=2e-7)


@pytest.mark.parametrize("lanes", WIDTHS)
def test_every_bfloat16_survives_widening_and_rounding(lanes: int) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    wide, back = torch.empty(x.shape), torch.empty_like(x)
    map_function(lambda v: v, "bf16", "f32", lanes)(x, wide)
    map_function(lambda v: v, "bf16", "bf16", lanes)(x, back)
    number = ~x.isnan()
    assert torch.equal(wide[number], x.float()[number])
    assert torch.equal(back[number].view(torch.int16), x[number].view(torch.int16))
    assert wide[~number].isnan().all() and back[~number].isnan().all()


@pytest.mark.parametrize("lanes", WIDTHS)
def test_rounding_to_bfloat16_is_to_nearest_even(lanes: int) -> None:
    high = torch.arange(0, 1 << 15, 7, dtype=torch.int32)
    bits = torch.cat([(high << 16) + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    bits = torch.cat([bits, bits | -(1 << 31)])
    x = bits[: bits.numel() // 16 * 16].view(torch.float32)
    y = torch.empty(x.shape, dtype=torch.bfloat16)
    map_function(lambda v: v, "f32", "bf16", lanes)(x, y)
    number = ~x.isnan()
    assert torch.equal(y[number].view(torch.int16), x.bfloat16()[number].view(torch.int16))
    assert y[~number].isnan().all()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_pairs_are_a_permutation_that_unpair_undoes(dtype: str, lanes: int) -> None:
    def build(restore: bool) -> Module:
        module = Module("pair", target_of(lanes))
        fn = module.function("f", [("x", "ptr"), ("out", "ptr")], internal=False)
        first, second = fn.buffer("x", dtype).load_pair(0, lanes)
        if restore:
            first, second = unpair(dtype, first, second)
        fn.buffer("out", "f32").store(first)
        fn.buffer("out", "f32").store(second, lanes)
        fn.finish()
        return module

    x = torch.arange(2.0 * lanes).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    out = torch.empty(2 * lanes)
    code = compile_module(lambda: build(True))
    code.function("f", ["ptr", "ptr"])(x.data_ptr(), out.data_ptr())
    assert torch.equal(out, x.float())
    code = compile_module(lambda: build(False))
    code.function("f", ["ptr", "ptr"])(x.data_ptr(), out.data_ptr())
    positions = [pair_position(dtype, lanes, element) for element in range(2 * lanes)]
    assert torch.equal(out[positions], x.float())


def test_loops_switches_and_tables() -> None:
    def build() -> Module:
        module = Module("control", host_target())
        fn = module.function("f", [("out", "ptr"), ("n", "i64")], internal=False)
        out, n = fn.buffer("out", "i64"), fn.arg["n"]
        table = module.table(fn, [5, 6, 7])
        with fn.loop(0, n) as index:
            result = fn.var(n.type, -1)

            def case(value: int) -> Callable[[], None]:
                return lambda: result.set(value)

            fn.switch(table.load(index % 3), {5: case(50), 7: case(70)})
            with fn.when_else(index.lt(2)) as (yes, no):
                with yes:
                    out.store(result.get(), index)
                with no:
                    out.store(result.get() * 2 + index, index)
        fn.finish()
        return module

    out = torch.zeros(6, dtype=torch.int64)
    code = compile_module(build)
    code.function("f", ["ptr", "i64"])(out.data_ptr(), 5)
    assert out.tolist() == [50, -1, 142, 103, 2, 0]
    code.function("f", ["ptr", "i64"])(out.data_ptr(), 0)
    assert out.tolist() == [50, -1, 142, 103, 2, 0]


def test_an_unknown_function_is_named() -> None:
    def build() -> Module:
        module = Module("empty", host_target())
        module.function("f", [], internal=False).finish()
        return module

    with pytest.raises(KeyError, match="no_such"):
        compile_module(build).address("no_such")


def _sum_of_products(fn: Function) -> None:
    width = fn.target.width
    total = fn.zeros(width)
    with fn.loop(0, fn.arg["n"], width) as index:
        total.set(
            fn.fma(
                fn.buffer("x", "bf16").load(index, width), exp(fn.buffer("y", "f32").load(index, width)), total.get()
            )
        )
    fn.buffer("out", "f32").store(fn.sum_lanes(total.get()))


@pytest.mark.parametrize(
    ("triple", "instruction"), [("x86_64-unknown-linux-gnu", "mulps"), ("aarch64-unknown-linux-gnu", "fmla")]
)
@pytest.mark.parametrize("width", [4, 8, 16])
def test_code_for_the_baseline_cpu_of_other_machines(triple: str, instruction: str, width: int) -> None:
    target = generic_target(triple, width, has_fma=triple.startswith("aarch64"))
    module = Module("other", target)
    fn = module.function("f", [("x", "ptr"), ("y", "ptr"), ("out", "ptr"), ("n", "i64")], internal=False)
    _sum_of_products(fn)
    fn.finish()
    text = assembly(module)
    assert instruction in text
    assert "fmaf" not in text  # no call of the C library for each lane
