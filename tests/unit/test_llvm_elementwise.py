"""CPU norms and gated activations against float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from hotswap.core.layers.jit import host_target
from hotswap.plugins.kernels.llvm_cpu import elementwise as module
from hotswap.plugins.kernels.llvm_cpu.elementwise import add_rms_norm, gelu_tanh_mul, rms_norm, silu_mul

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (weight.double() + offset)


def assert_close(actual: torch.Tensor, exact: torch.Tensor, roundings: int = 1) -> None:
    """float32 within a few rounding errors; bfloat16 so many roundings of such a float32."""
    relative = 2e-6 if actual.dtype == torch.float32 else 2**-8 * 1.01 * roundings
    assert ((actual.double() - exact).abs() <= relative * exact.abs() + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "h"), [(1, 1), (1, 576), (3, 37), (17, 64), (70, 576)])
def test_rms_norm(dtype: torch.dtype, rows: int, h: int) -> None:
    x = random(rows, h, dtype=dtype)
    for weight in (random(h, seed=1), random(h, seed=1, dtype=torch.bfloat16)):
        assert_close(rms_norm(x, weight, EPS, wide=True), normed(x, weight))
        assert_close(rms_norm(x, weight, EPS, wide=True, weight_offset=1.0), normed(x, weight, 1.0))
        assert_close(rms_norm(x, weight, EPS), normed(x, weight), roundings=2)


def test_bfloat16_norm_agrees_with_torch_operations() -> None:
    """The contract's order: the normalised value is rounded, then the weight multiplies."""
    x, weight = random(50, 576, dtype=torch.bfloat16), random(576, seed=1, dtype=torch.bfloat16)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).bfloat16()
    # A different order of the sum of squares may move a value over a rounding boundary, rarely.
    assert (rms_norm(x, weight, EPS) == expected).float().mean() > 0.999


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_each_head_in_a_view_of_qkv(dtype: torch.dtype) -> None:
    qkv = random(5, 9 * 24, dtype=dtype)
    before = qkv.clone()
    q = qkv[:, : 4 * 24].view(5, 4, 24)
    weight = random(24, seed=1)
    expected = normed(q, weight)
    assert rms_norm(q, weight, EPS, q) is q
    assert_close(q, expected, roundings=2)
    assert torch.equal(qkv[:, 4 * 24 :], before[:, 4 * 24 :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "h"), [(1, 576), (3, 37), (70, 576)])
def test_add_rms_norm(dtype: torch.dtype, rows: int, h: int) -> None:
    x, residual, weight = (
        random(rows, h, dtype=dtype),
        random(rows, h, seed=1, dtype=dtype),
        random(h, seed=2, dtype=dtype),
    )
    expected = x + residual
    result = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, expected)
    assert_close(result, normed(expected, weight), roundings=2)
    again = add_rms_norm(x, residual, weight, EPS, x, wide=True, weight_offset=1.0)
    assert again is x
    assert_close(again, normed(residual, weight, 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 1536), (3, 37), (40, 1100)])
def test_gated_activations(dtype: torch.dtype, rows: int, columns: int) -> None:
    x = random(rows, 2 * columns, dtype=dtype) * 4
    gate, up = x.double().chunk(2, 1)
    assert_close(silu_mul(x), torch.nn.functional.silu(gate) * up)
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    actual = gelu_tanh_mul(x)
    # Far below zero gelu is a difference of nearly equal numbers in its definition, even in float64.
    assert_close(actual[gate > -4], exact[gate > -4])
    torch.testing.assert_close(actual.double(), exact, rtol=1e-2, atol=1e-4)


def test_activations_of_extremes() -> None:
    gate = torch.tensor([[0.0, -0.0, 200.0, -200.0, -1e30, 1e30, math.nan, math.inf]])
    x = torch.cat([gate, torch.ones(1, 8)], dim=1)
    for function in (silu_mul, gelu_tanh_mul):
        y = function(x)[0]
        assert y[:2].tolist() == [0.0, 0.0]
        assert y[2] == 200.0 and y[3] == 0.0 and y[4] == 0.0 and y[5] == torch.tensor(1e30)
        assert y[6].isnan() and y[7] == math.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_do_not_depend_on_batch_or_threads(dtype: torch.dtype) -> None:
    x, weight = random(90, 576, dtype=dtype), random(576, seed=1)
    whole, gated = rms_norm(x, weight, EPS, threads=1), silu_mul(x, threads=1)
    for start, stop in ((0, 1), (5, 12), (89, 90), (0, 90)):
        for threads in (1, 2):
            assert torch.equal(rms_norm(x[start:stop], weight, EPS, threads=threads), whole[start:stop])
            assert torch.equal(silu_mul(x[start:stop], threads=threads), gated[start:stop])


@pytest.mark.parametrize("width", [4, 16])
def test_other_vector_shapes(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    target = dataclasses.replace(host_target(), width=width)
    monkeypatch.setattr(module, "host_target", lambda: target)
    for dtype in DTYPES:
        x, weight = random(6, 166, dtype=dtype), random(166, seed=1)
        assert_close(rms_norm(x, weight, EPS), normed(x, weight), roundings=2)
        gate, up = x.double().chunk(2, 1)
        assert_close(silu_mul(x), torch.nn.functional.silu(gate) * up)


def test_strided_rows() -> None:
    wide = random(4, 100)
    x, weight = wide[:, 10:74], random(64, seed=1)
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm(x.contiguous(), weight, EPS))
    assert torch.equal(silu_mul(x), silu_mul(x.contiguous()))
    residual, other = random(4, 90, seed=2), random(4, 64, seed=3)
    view = residual[:, 5:69]
    expected = view.clone()
    result = add_rms_norm(other, view, weight, EPS)
    assert torch.equal(result, add_rms_norm(other, expected, weight, EPS)) and torch.equal(view, expected)


def test_wrong_arguments_are_named() -> None:
    x, weight = random(4, 64), random(64)
    with pytest.raises(ValueError, match=r"weight must be \[64\]"):
        rms_norm(x, random(63), EPS)
    with pytest.raises(ValueError, match="out must be"):
        rms_norm(x, weight, EPS, torch.empty(4, 65))
    with pytest.raises(ValueError, match="contiguous within a row"):
        rms_norm(random(64, 4).t(), weight, EPS)
    with pytest.raises(TypeError, match="float64"):
        rms_norm(x.double(), weight, EPS)
    with pytest.raises(ValueError, match="of one dtype"):
        add_rms_norm(x, x.bfloat16(), weight, EPS)
    with pytest.raises(ValueError, match="gate_up"):
        silu_mul(random(4, 63))
