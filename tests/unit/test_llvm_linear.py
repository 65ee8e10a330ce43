"""CPU linear layers against float64, and the promise that a row's bits do not depend on its batch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hotswap.core.layers.jit import host_target
from hotswap.plugins.kernels.llvm_cpu import linear as module
from hotswap.plugins.kernels.llvm_cpu.linear import linear, pack

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_close(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Within float32 accuracy of a dot product: relative to the sum of the magnitudes, not to a result that cancels."""
    exact = reference(x, weight, bias)
    scale = reference(x.abs(), weight.abs(), None if bias is None else bias.abs())
    bound = scale * 1e-6 * math.sqrt(x.shape[1]) / 4
    if actual.dtype == torch.bfloat16:
        bound = bound + exact.abs() * 2**-8
    assert ((actual.double() - exact).abs() <= bound + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 3), (16, 8), (40, 37), (64, 576), (203, 130), (960, 64)])
def test_against_float64(dtype: torch.dtype, n: int, k: int) -> None:
    weight = random(n, k, seed=n, dtype=dtype)
    packed = pack(weight)
    assert torch.equal(packed.unpack(), weight)
    for m in (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 33, 130):
        x = random(m, k, seed=m)
        assert_close(linear(x, packed), x, weight, None)
        bias = random(n, seed=m + 1)
        assert_close(linear(x, packed, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bfloat16_activations_bias_and_output(dtype: torch.dtype) -> None:
    weight, x, bias = random(50, 96, dtype=dtype), random(9, 96, seed=1), random(50, seed=2)
    packed = pack(weight)
    half = linear(x.bfloat16(), packed, bias.bfloat16())
    assert half.dtype == torch.bfloat16
    assert_close(half, x.bfloat16(), weight, bias.bfloat16())
    assert torch.equal(half, linear(x.bfloat16().float(), packed, bias.bfloat16()).bfloat16())
    assert linear(x, packed, out_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert linear(x.bfloat16(), packed, out_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(40, 37), (576, 576), (51, 1536)])
def test_bits_of_a_row_do_not_depend_on_the_batch(dtype: torch.dtype, n: int, k: int) -> None:
    packed = pack(random(n, k, dtype=dtype))
    x = random(140, k, seed=1)
    whole = linear(x, packed)
    for m in (*range(1, 20), 24, 31, 64, 139):
        for start in (0, 1, 140 - m):
            assert torch.equal(linear(x[start : start + m], packed), whole[start : start + m]), (m, start)
    order = torch.randperm(140, generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear(x[order], packed), whole[order])


@pytest.mark.parametrize("m", [1, 5, 130])
def test_bits_do_not_depend_on_the_number_of_threads(m: int) -> None:
    packed = pack(random(251, 300, dtype=torch.bfloat16))
    x = random(m, 300, seed=1)
    alone = linear(x, packed, threads=1)
    for threads in (2, 3):
        for _ in range(5):
            assert torch.equal(linear(x, packed, threads=threads), alone)


def test_bits_do_not_depend_on_the_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(random(211, 300))
    x = random(45, 300, seed=1)
    whole = linear(x, packed)
    for blocks in ((6, 1), (7, 3), (45, 14), (13, 4)):
        monkeypatch.setattr(module, "_blocking", lambda *_, blocks=blocks: blocks)
        assert torch.equal(linear(x, packed), whole), blocks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "registers"), [(4, 16), (4, 32), (8, 32), (16, 32)])
def test_other_vector_shapes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, registers: int) -> None:
    """The code that another CPU would run, run here: LLVM splits or widens the vectors."""
    target = dataclasses.replace(host_target(), width=width, registers=registers)
    weight = random(75, 50, dtype=dtype)
    x = random(37, 50, seed=1)
    here = linear(x, pack(weight))
    monkeypatch.setattr(module, "host_target", lambda: target)
    packed = pack(weight)
    assert packed.panels.shape[2] == 2 * width and torch.equal(packed.unpack(), weight)
    for m in (1, 2, 3, 5, 8, 12, 23, 37):
        assert torch.equal(linear(x[:m], packed), here[:m]), m


def test_strided_rows_and_a_given_output() -> None:
    weight = random(40, 24)
    packed = pack(weight)
    wide = random(7, 60, seed=1)
    x = wide[:, 10:34]
    out = torch.full((7, 100), 7.0)
    result = linear(x, packed, None, out[:, 3:43])
    assert result.data_ptr() == out[:, 3:43].data_ptr()
    assert torch.equal(out[:, 3:43], linear(x.contiguous(), packed))
    assert (out[:, :3] == 7).all() and (out[:, 43:] == 7).all()
    assert torch.equal(linear(wide[:, 10:34].t().contiguous().t(), packed), out[:, 3:43])
    assert torch.equal(pack(weight.t().contiguous().t()).panels, packed.panels)


def test_not_a_number_and_infinity() -> None:
    weight = random(20, 8)
    packed = pack(weight)
    x = random(3, 8, seed=1)
    x[1, 2] = math.nan
    x[2, 3] = math.inf
    for out_dtype in DTYPES:
        y = linear(x, packed, out_dtype=out_dtype)
        assert y[0].isfinite().all() and y[1].isnan().all() and y[2].isinf().all()


def test_no_rows() -> None:
    assert linear(torch.empty(0, 8), pack(random(20, 8))).shape == (0, 20)


def test_wrong_arguments_are_named() -> None:
    packed = pack(random(20, 8))
    with pytest.raises(ValueError, match="x has 9 columns, the weight 8"):
        linear(random(2, 9), packed)
    with pytest.raises(ValueError, match="out must be"):
        linear(random(2, 8), packed, out=torch.empty(2, 21))
    with pytest.raises(TypeError, match="float16"):
        linear(random(2, 8), packed, out_dtype=torch.float16)
    with pytest.raises(TypeError, match="float16"):
        pack(random(20, 8).half())
    with pytest.raises(ValueError, match=r"\[N, K\]"):
        pack(random(8))
    with pytest.raises(ValueError, match="bias"):
        linear(random(2, 8), packed, random(19))
