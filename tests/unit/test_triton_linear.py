"""The Triton products under the interpreter: against float64, the promise of equal bits, and the rule of launch shapes."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from hotswap.core.testing.suites.kernels import check_gated
from hotswap.plugins.kernels.triton import linear_shapes
from hotswap.plugins.kernels.triton.gated_linear import gated_product
from hotswap.plugins.kernels.triton.linear import TritonLinear, product
from hotswap.plugins.kernels.triton.linear_shapes import (
    GATED_TOKENS,
    MATVEC_TOKENS,
    SMALL,
    Dot,
    Early,
    Gated,
    Matvec,
    fixed_shape,
    gated_shape,
    shape_for,
)
from hotswap.plugins.kernels.triton.linear_table import TABLE

HOPPER = (9, 0)
MATRICES = [
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (128256, 4096),
    (960, 576),
    (576, 1536),
    (49152, 576),
    (5120, 17408),
    (7, 37),
    (1, 1),
]
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}  # the interpreter cuts bfloat16 off

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Relative to the sum of the magnitudes, and one rounding to the result's dtype."""
    terms = [x, weight] + ([] if bias is None else [bias])
    exact = torch.nn.functional.linear(*(term.double() for term in terms))
    size = torch.nn.functional.linear(*(term.double().abs() for term in terms))
    bound = size * 1e-6 * max(1.0, math.sqrt(x.shape[1]) / 4) + exact.abs() * ROUNDING[found.dtype] * 1.02 + 1e-7
    assert found.shape == exact.shape
    assert ((found.double() - exact).abs() <= bound).all()  # a NaN fails, too


def poisoned() -> torch.Tensor:
    """Counters; and the memory of freed tensors, which results may take next, holds NaN."""
    torch.full((1 << 16,), math.nan, device=DEVICE)
    return torch.zeros(64, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "n", "k", "shape"),
    [
        (1, 13, 130, Matvec(8, 64)),
        (1, 3, 40, Matvec(4, 64)),
        (2, 5, 100, Matvec(4, 128)),
        (3, 6, 150, Matvec(4, 64)),
        (4, 4, 64, Matvec(4, 64, 1)),
    ],
)
def test_matvec_against_float64(dtype: torch.dtype, tokens: int, n: int, k: int, shape: Matvec) -> None:
    x, weight = random(tokens, k + 8, dtype=dtype)[:, 8:], random(n, k, seed=1, dtype=dtype)
    bias = random(n, seed=2, dtype=dtype) if tokens != 2 else None
    out_dtype = torch.float32 if tokens == 3 else dtype
    found = product(x, weight, bias, out_dtype, shape, poisoned(), False)
    assert found.dtype is out_dtype
    assert_close(found, x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "n", "k", "shape"),
    [
        (5, 70, 200, Dot(16, 64, 64, 3)),
        (19, 40, 130, Dot(16, 32, 64, 2, split=False, w_first=False)),
        (1, 1, 1, Dot(16, 16, 32)),
        (7, 33, 300, Dot(16, 64, 64, 2, early=Early.REGISTERS)),
        (3, 64, 256, Dot(16, 32, 64, 4, w_first=False, early=Early.BULK)),  # whole blocks: no mask in the loop
        (2, 32, 129, Dot(16, 32, 64, 5, early=Early.REGISTERS)),  # segments without a column
    ],
)
def test_dot_against_float64(dtype: torch.dtype, tokens: int, n: int, k: int, shape: Dot) -> None:
    x, weight = random(tokens, k + 8, dtype=dtype)[:, 8:], random(n, k, seed=1, dtype=dtype)
    bias = random(n, seed=2, dtype=dtype) if tokens != 3 else None
    out_dtype = torch.float32 if tokens == 7 else dtype
    counters = poisoned()
    found = product(x, weight, bias, out_dtype, shape, counters, False)
    assert found.dtype is out_dtype
    assert_close(found, x, weight, bias)
    assert not counters.any(), "the next launch would not see who comes last"


def test_more_tiles_than_counters_are_not_split_and_give_the_same_bits() -> None:
    x, weight = random(3, 300, dtype=torch.float16), random(50, 300, seed=1, dtype=torch.float16)
    shape = Dot(16, 32, 64, 3)
    split = product(x, weight, None, torch.float32, shape, poisoned(), False)
    one_counter = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert torch.equal(split, product(x, weight, None, torch.float32, shape, one_counter, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    kernel = TritonLinear(HOPPER, deterministic=True)
    x, packed = random(70, 1030, dtype=dtype), kernel.pack(random(20, 1030, seed=1, dtype=dtype))
    whole = kernel.apply(x, packed, None, torch.float32)
    assert_close(whole, x, packed.unpack(), None)
    for tokens in (1, 6):
        assert torch.equal(kernel.apply(x[:tokens], packed, None, torch.float32), whole[:tokens])


def test_rows_of_a_bucket_do_not_depend_on_the_batch() -> None:
    weight, x = random(40, 200, seed=1, dtype=torch.float16), random(9, 200, dtype=torch.float16)
    shape = Dot(16, 32, 64, 2)
    whole = product(x, weight, None, torch.float16, shape, poisoned(), False)
    spoilt = x.clone()
    spoilt[1:] = math.nan
    assert torch.equal(product(spoilt, weight, None, torch.float16, shape, poisoned(), False)[0], whole[0])
    assert torch.equal(product(x[:1], weight, None, torch.float16, shape, poisoned(), False), whole[:1])


def test_many_tokens_and_mixtures_are_served_by_torch() -> None:
    kernel = TritonLinear(HOPPER)
    for x_dtype, weight_dtype in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)):
        weight, bias = random(24, 96, seed=1, dtype=weight_dtype), random(24, seed=2, dtype=weight_dtype)
        x = random(300, 96, dtype=x_dtype)
        for out_dtype in (None, torch.float32):
            found = kernel.apply(x, kernel.pack(weight), bias, out_dtype)
            assert found.dtype is (out_dtype or x_dtype)
            assert_close(found, x, weight, bias)


def test_logits_are_not_rounded_in_between() -> None:
    """Two columns that differ by less than bfloat16 shows must not tie."""
    weight = torch.ones(2, 64, dtype=torch.bfloat16, device=DEVICE)
    weight[1, 0] += 2.0**-7
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=DEVICE)
    for tokens in (1, 5, 400):
        for deterministic in (False, True):
            kernel = TritonLinear(HOPPER, deterministic=deterministic)
            if tokens == 400 and deterministic:
                continue
            found = kernel.apply(x.expand(tokens, 64).contiguous(), kernel.pack(weight), None, torch.float32)
            assert (found[:, 1] - found[:, 0] == 2.0**-7).all()


def test_no_rows_and_too_many() -> None:
    kernel = TritonLinear(HOPPER)
    weight = random(8, 16, dtype=torch.bfloat16)
    assert kernel.apply(weight[:0], kernel.pack(weight), None).shape == (0, 8)
    with pytest.raises(ValueError, match="up to 4 rows, not 5"):
        product(random(5, 16), random(8, 16), None, torch.float32, Matvec(1, 16), poisoned(), False)


def test_pack_gives_rows_that_the_widest_loads_take() -> None:
    weight = random(9, 16, dtype=torch.bfloat16)
    kernel = TritonLinear(HOPPER)
    assert kernel.pack(weight).tensor is weight, "a copy of a whole model's weights"
    for odd in (weight.flatten()[1:129].view(8, 16), weight.t()):
        packed = kernel.pack(odd)
        assert torch.equal(packed.unpack(), odd)
        assert packed.tensor.is_contiguous() and packed.tensor.data_ptr() % 16 == 0


@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 9), HOPPER, (12, 0)])
def test_rule_fits_every_matrix(capability: tuple[int, int]) -> None:
    memory = {(8, 0): 163, HOPPER: 227}.get(capability, 64 if capability == (0, 0) else 99) << 10
    for n, k in MATRICES:
        shapes = set()
        for tokens in (1, 2, 3, 4, 5, 8, 12, 16, 17, 48, 64, 65, 128, 200, 256, 257, 4096):
            shape = shape_for(capability, n, k, tokens, 132)
            shapes.add(shape)
            if tokens > 256:
                assert shape is None
            elif tokens <= 64 or (n * k <= SMALL and (n, k) not in TABLE.get(capability, {})):
                assert shape is not None, "a product of few rows is ours"
            assert not isinstance(shape, Matvec) or tokens <= MATVEC_TOKENS
            if isinstance(shape, Dot):
                _check_dot(shape, 2, memory)
            for itemsize in (2, 4):
                _check_dot(fixed_shape(capability, n, k, tokens, 132, itemsize), itemsize, memory)
        assert len(shapes) <= 8, f"{n} x {k} needs {len(shapes)} variants"


def _check_dot(shape: Dot, itemsize: int, memory: int) -> None:
    for number in (shape.block_t, shape.block_n, shape.block_k, shape.warps, shape.early_bytes):
        assert number & (number - 1) == 0
    assert shape.block_t >= 16 and shape.block_n >= 16 and shape.block_k >= 16 and shape.early_bytes >= 128
    assert 1 <= shape.segments <= 16
    assert (shape.block_t + shape.block_n) * shape.block_k * itemsize * (shape.stages - 1) <= memory


def test_deterministic_shape_is_one_for_all_tokens() -> None:
    for n, k in MATRICES:
        shapes = {fixed_shape(HOPPER, n, k, tokens, 132, 2) for tokens in (1, 64, 65, 4096)}
        assert len({(s.block_t, s.block_n, s.block_k, s.segments, s.w_first) for s in shapes}) == 1
        # A segment of one block would be folded into the sum of the others.
        assert all(s.segments == 1 or k > s.block_k * s.segments for s in shapes)


def test_table_is_in_order() -> None:
    for matrices in TABLE.values():
        for matrix, rows in matrices.items():
            limits = [most for most, _ in rows]
            assert limits == sorted(set(limits)), matrix
            assert all(most <= MATVEC_TOKENS for most, shape in rows if isinstance(shape, Matvec)), matrix


# With the activation in the epilogue


@pytest.mark.parametrize("op", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize(("tokens", "width", "k"), [(1, 8, 8), (5, 40, 72), (70, 200, 136)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_product_is_the_two_steps(dtype: torch.dtype, tokens: int, width: int, k: int, op: str) -> None:
    """Rows, columns and K that are no multiples of a tile; several bands, and one that is higher than all rows."""
    x, weight = random(tokens, k, dtype=dtype), random(2 * width, k, seed=1, dtype=dtype) / k**0.5
    for band in (1, 2, 7):
        shape = Gated(block_t=32, block_i=32, block_k=32, band=band, warps=4, stages=2)
        poisoned()
        check_gated(gated_product(x, weight, shape, gelu=op == "gelu_tanh_mul"), x, weight, op)


def test_what_is_fused_with_the_activation() -> None:
    """Many rows of a large matrix on Hopper, whose rows tensor maps take; all rows in one band while they are few."""
    assert gated_shape(HOPPER, 14336, 4096, GATED_TOKENS - 1) is None
    few, many = gated_shape(HOPPER, 14336, 4096, GATED_TOKENS), gated_shape(HOPPER, 14336, 4096, 8192)
    assert few is not None and few.band == -(-GATED_TOKENS // few.block_t)
    assert many is not None and many.band == Gated().band
    assert gated_shape(HOPPER, 1536, 576, 8192) is None
    assert gated_shape(HOPPER, 14336, 4100, 8192) is None and gated_shape(HOPPER, 14340, 4096, 8192) is None
    assert gated_shape((8, 0), 14336, 4096, 8192) is None and gated_shape((0, 0), 14336, 4096, 8192) is None


def test_the_kernel_fuses_halves_that_are_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_shapes, "GATED_TOKENS", 3)
    monkeypatch.setattr(linear_shapes, "GATED_SIZE", 1)
    x, weight = random(4, 80, dtype=torch.float16)[:, 8:72], random(32, 64, seed=1, dtype=torch.float16) / 8
    kernel = TritonLinear(HOPPER)
    found = kernel.apply_gated(x, kernel.pack(weight), "silu_mul")
    assert found is not None
    check_gated(found, x, weight, "silu_mul")
    assert kernel.apply_gated(x[:2], kernel.pack(weight), "silu_mul") is None
    assert kernel.apply_gated(x.float(), kernel.pack(weight.float()), "silu_mul") is None
    assert kernel.apply_gated(x.float(), kernel.pack(weight), "silu_mul") is None
    fixed = TritonLinear(HOPPER, deterministic=True)
    assert fixed.apply_gated(x, fixed.pack(weight), "silu_mul") is None


def test_sums_are_left_to_the_norm_where_torch_has_no_library_for_them() -> None:
    kernel = TritonLinear(HOPPER)
    residual = random(2048, 16, dtype=torch.float16)
    before = residual.clone()
    x = random(2048, 8, seed=1, dtype=torch.float16)
    done = kernel.add_product(x, kernel.pack(random(16, 8, seed=2, dtype=torch.float16)), residual)
    assert done is (DEVICE == "cuda")
    assert torch.equal(residual, before) is not done
