"""What every kernel must hold: the op's definition in float64, within the rounding that the contract allows.

    from hotswap.core.testing.suites import KernelsSuite

    class TestMyRmsNorm(KernelsSuite):
        plugin = "hotswap_my_kernels"
        op = "rms_norm"

One class for each op that the plugin offers; checks of other ops are skipped. `op` may be left out for a plugin with one.
On another device than the CPU: `torch_device = "cuda"`, and `device`, what the context says of it. The definitions are
computed on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ...contracts.kernels import LinearKernel
from . import kernels_rows as pool
from . import kernels_sampling as sampling
from . import kernels_step as step
from .base import ConformanceSuite
from .kernels_step import angles, rotate

EPS = 1e-5
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of one rounding, relative
ARITHMETIC = 4e-6  # relative error of float32 arithmetic that is good enough, before the result is rounded
ROWS_AND_WIDTHS = ((1, 1), (1, 576), (3, 37), (17, 64), (5, 130))
GATED_OPS = ("silu_mul", "gelu_tanh_mul")
LINEAR_SHAPES = ((1, 1), (5, 3), (40, 37), (203, 130), (64, 576))  # [N, K]
# heads, KV heads, head size, rotated dimensions
ROPE_SHAPES = ((9, 3, 64, 64), (2, 2, 24, 10), (4, 1, 80, 80), (3, 1, 6, 2))


class KernelsSuite(ConformanceSuite):
    kind: ClassVar[str] = "kernels"

    def op_name(self) -> str:
        name: str = self.op or self.registered().op or ""
        return name

    def context_fields(self) -> dict[str, Any]:
        return {"op": self.op_name(), "dtype": "float32"}

    def dtypes(self) -> list[torch.dtype]:
        """Those of activations that it takes; skips the test when it takes none on this machine."""
        provider = self.registered().provider
        taken, reasons = [], []
        for name in ("float32", "bfloat16", "float16"):
            against = list(provider.unavailable(self.context(dtype=name)))
            reasons += against
            if not against:
                taken.append(getattr(torch, name))
        if not taken:
            pytest.skip(f"cannot run here: {'; '.join(dict.fromkeys(reasons))}")
        return taken

    def kernel(self, *ops: str, dtype: torch.dtype | None = None) -> Any:
        """The kernel under test for activations of `dtype`; skips the test when it is of none of these ops."""
        if self.op_name() not in ops:
            pytest.skip(f"it is a kernel of {self.op_name()}")
        name = str(dtype or self.dtypes()[0]).removeprefix("torch.")
        return self.build(dtype=name)

    @pytest.fixture
    def product(self) -> Any:
        return self.kernel(self.op_name())

    def normal(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers on the device under test, the same each time."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(self.torch_device)

    # Norms

    def test_rms_norm_equals_its_definition(self) -> None:
        """rms_norm is x / sqrt(mean(x^2) + eps) in float32, cast to x's dtype, times the weight; any shape, small or
        large values, inputs as they were."""
        self.kernel("rms_norm")
        for dtype in self.dtypes():
            kernel = self.kernel("rms_norm", dtype=dtype)
            for (rows, width), size in zip(ROWS_AND_WIDTHS, (1.0, 1e-3, 30.0, 1e-2, 1.0), strict=True):
                x, weight = self.normal(rows, width, dtype=dtype) * size, self.normal(width, seed=1, dtype=dtype)
                out = unchanged(kernel, x, weight, EPS)
                check(out, normed(x, weight), roundings=2, shape=(rows, width), dtype=dtype)

    def test_rms_norm_takes_wide_activations_beside_narrow_weights(self) -> None:
        """Float32 activations with a bfloat16 weight give a float32 result: the CPU's usual mixture."""
        kernel = self.kernel("rms_norm", "add_rms_norm", dtype=torch.float32)
        x, weight = self.normal(4, 96), self.normal(96, seed=1, dtype=torch.bfloat16)
        if self.op_name() == "rms_norm":
            check(kernel(x, weight, EPS), normed(x, weight), shape=(4, 96), dtype=torch.float32)
        else:
            check(kernel(x, torch.zeros_like(x), weight, EPS), normed(x, weight), shape=(4, 96), dtype=torch.float32)

    def test_add_rms_norm_adds_in_place_and_norms_the_sum(self) -> None:
        """add_rms_norm adds x to the residual in place, rounds once, and returns the norm of the sum; x stays."""
        self.kernel("add_rms_norm")
        for dtype in self.dtypes():
            kernel = self.kernel("add_rms_norm", dtype=dtype)
            for rows, width in ROWS_AND_WIDTHS:
                x, weight = self.normal(rows, width, dtype=dtype), self.normal(width, seed=1, dtype=dtype)
                residual = self.normal(rows, width, seed=2, dtype=dtype)
                total, before = x + residual, (x.clone(), weight.clone())
                out = kernel(x, residual, weight, EPS)
                assert torch.equal(residual, total), f"{dtype} [{rows}, {width}]: the residual is not residual + x"
                assert torch.equal(x, before[0]) and torch.equal(weight, before[1]), "it changed x or the weight"
                assert out.data_ptr() not in (x.data_ptr(), residual.data_ptr()), "the result is no new tensor"
                check(out, normed(total, weight), roundings=2, shape=(rows, width), dtype=dtype)

    # Gated activations

    def test_gated_activation_equals_its_definition(self) -> None:
        """silu_mul is silu(gate) * up, gelu_tanh_mul gelu(gate) * up with the tanh form; gate is the first half."""
        self.kernel(*GATED_OPS)
        for dtype in self.dtypes():
            kernel = self.kernel(*GATED_OPS, dtype=dtype)
            for rows, width in ROWS_AND_WIDTHS:
                x = 4 * self.normal(rows, 2 * width, dtype=dtype)
                gate, up = x.cpu().double().chunk(2, dim=1)
                out = unchanged(kernel, x)
                # Far below zero gelu is a difference of nearly equal numbers: an absolute error of the size of one.
                slack = 4e-7 * (gate * up).abs()
                check(out, self._gated(gate) * up, roundings=2, shape=(rows, width), dtype=dtype, slack=slack)

    def test_gated_activation_of_extremes(self) -> None:
        """Values far from zero neither overflow nor turn into NaN; a NaN stays one."""
        kernel = self.kernel(*GATED_OPS)
        gate = torch.tensor(
            [[0.0, 200.0, -200.0, -3e4, 3e4, math.nan]], dtype=self.dtypes()[0], device=self.torch_device
        )
        out = kernel(torch.cat((gate, torch.ones_like(gate)), dim=1))[0]
        assert out[:4].tolist() == [0.0, 200.0, 0.0, 0.0] and out[4] == gate[0, 4] and out[5].isnan(), out.tolist()

    def _gated(self, gate: Tensor) -> Tensor:
        return F.silu(gate) if self.op_name() == "silu_mul" else F.gelu(gate, approximate="tanh")

    # Rotation

    def test_rope_rotates_in_place(self) -> None:
        """rope rotates the pairs (i, i + D_rot / 2) of q and k in place, leaves what is beyond D_rot, and touches
        nothing beside them: q and k are views of a fused projection."""
        self.kernel("rope")
        for dtype in self.dtypes():
            kernel = self.kernel("rope", dtype=dtype)
            for heads, kv_heads, size, rotated in ROPE_SHAPES:
                for tokens in (1, 13):
                    qkv = self.normal(tokens, heads + 2 * kv_heads, size, dtype=dtype)
                    before = qkv.clone()
                    q, k, _ = qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)
                    positions = torch.randint(0, 500, (tokens,), generator=torch.Generator().manual_seed(tokens))
                    positions, table = positions.to(self.torch_device), angles(500, rotated).to(self.torch_device)
                    assert kernel(q, k, positions, table) is None, "it works in place and returns nothing"
                    wanted = rotate(before[:, : heads + kv_heads], positions, table)
                    found = qkv[:, : heads + kv_heads]
                    limit = ROUNDOFF[dtype] * 1.01 * wanted.abs() + 4e-6
                    where = f"{dtype}, {heads} and {kv_heads} heads of {size}, {rotated} rotated, {tokens} token(s)"
                    assert ((found.cpu().double() - wanted).abs() <= limit).all(), where
                    assert torch.equal(found[..., rotated:], before[:, : heads + kv_heads, rotated:]), where
                    assert torch.equal(qkv[:, heads + kv_heads :], before[:, heads + kv_heads :]), where

    # Products

    def test_linear_equals_its_definition(self) -> None:
        """linear is x W^T + bias within float32 accuracy of a dot product, for any shape, one row or many."""
        self._need_linear()
        for dtype in self.dtypes():
            kernel: LinearKernel = self.kernel("linear", dtype=dtype)
            for n, k in LINEAR_SHAPES:
                weight, bias = self.normal(n, k, seed=n, dtype=dtype), self.normal(n, seed=3, dtype=dtype)
                packed = kernel.pack(weight.clone())
                assert (packed.out_features, packed.in_features) == (n, k)
                for rows in (1, 7, 33):
                    x = self.normal(rows, k, seed=rows, dtype=dtype)
                    for given in (None, bias):
                        out = unchanged(kernel.apply, x, packed, given)
                        check_product(out, x, weight, given, dtype)

    def test_linear_unpacks_what_it_packed(self) -> None:
        """`unpack` gives the logical weight again, bit for bit, whatever its strides were."""
        kernel: LinearKernel = self.kernel("linear")
        for dtype in self.dtypes():
            for n, k in LINEAR_SHAPES:
                weight = self.normal(n, k, seed=n, dtype=dtype)
                assert torch.equal(kernel.pack(weight.clone()).unpack(), weight), f"{dtype} [{n}, {k}]"
                turned = weight.t().contiguous().t()
                assert torch.equal(kernel.pack(turned).unpack(), weight), f"{dtype} [{n}, {k}], transposed in memory"

    def test_linear_accumulates_in_float32(self) -> None:
        """A long sum of small products is as exact as float32 makes it, in whatever dtype the operands are."""
        self._need_linear()
        for dtype in self.dtypes():
            kernel: LinearKernel = self.kernel("linear", dtype=dtype)
            x, weight = self.normal(3, 4096, dtype=dtype), self.normal(8, 4096, seed=1, dtype=dtype)
            out = kernel.apply(x, kernel.pack(weight.clone()), None, torch.float32)
            check_product(out, x, weight, None, torch.float32)

    def test_linear_gives_the_dtype_that_is_asked_for(self) -> None:
        """The result is in out_dtype, by default that of x, and rounded once; operands may differ in dtype."""
        self._need_linear()
        served = self.dtypes()
        for dtype in served:
            kernel: LinearKernel = self.kernel("linear", dtype=dtype)
            for weight_dtype in served:
                x, weight = self.normal(5, 96, dtype=dtype), self.normal(24, 96, seed=1, dtype=weight_dtype)
                bias = self.normal(24, seed=2, dtype=weight_dtype)
                packed = kernel.pack(weight.clone())
                for asked in (None, *served):
                    out = kernel.apply(x, packed, bias, asked)
                    assert out.dtype == (asked or dtype), f"{out.dtype} instead of {asked or dtype}"
                    check_product(out, x, weight, bias, max((dtype, out.dtype), key=lambda d: ROUNDOFF[d]))

    def test_linear_fused_forms_equal_their_definitions(self) -> None:
        """Where the kernel does them, apply_gated is the op of the rounded product and add_product the sum with it; where it
        does not, nothing has changed."""
        self._need_linear()
        sizes = [(3, 8, 16), (33, 40, 64)]
        if self.torch_device != "cpu":  # kernels fuse what is large
            sizes += [(2100, 2056, 2048), (1100, 136, 4096)]
        for dtype in self.dtypes():
            kernel: LinearKernel = self.kernel("linear", dtype=dtype)
            for rows, width, k in sizes:
                x, weight = self.normal(rows, k, dtype=dtype), self.normal(2 * width, k, seed=1, dtype=dtype)
                packed = kernel.pack((weight / k**0.5).to(dtype))
                for op in GATED_OPS:
                    check_gated(kernel.apply_gated(x, packed, op), x, packed.unpack(), op)
                residual = self.normal(rows, 2 * width, seed=2, dtype=dtype)
                before = residual.clone()
                if kernel.add_product(x, packed, residual):
                    check_sum(residual, before, x, packed.unpack())
                else:
                    assert torch.equal(residual, before), "add_product said no and changed the residual"

    def _need_linear(self) -> None:
        self.kernel("linear")

    # The cache, and where tokens stand

    def test_rope_write_kv_rotates_and_writes(self) -> None:
        """rope_write_kv rotates q in place as rope does, and puts rotated k, and v, at their slots of a cache in either
        layout; slot -1 writes nothing, and nothing beside the slots changes."""
        self.kernel("rope_write_kv")
        for dtype in self.dtypes():
            kernel = self.kernel("rope_write_kv", dtype=dtype)
            for shape in step.CACHE_SHAPES:
                for tokens, heads_first in ((1, False), (5, True)):
                    case = step.cache_case(shape, tokens, self.torch_device, dtype, heads_first=heads_first)
                    where = f"{dtype}, {shape}, {tokens} token(s), {'heads' if heads_first else 'tokens'} first"
                    step.check_cache_write(kernel, case, ROUNDOFF[dtype], True, where)

    def test_rope_write_kv_without_angles_only_writes(self) -> None:
        """cos_sin None: q stays as it is, and k and v go to the cache bit for bit."""
        self.kernel("rope_write_kv")
        for dtype in self.dtypes():
            kernel = self.kernel("rope_write_kv", dtype=dtype)
            for shape in step.CACHE_SHAPES:
                case = step.cache_case(shape, 4, self.torch_device, dtype)
                step.check_cache_write(kernel, case, ROUNDOFF[dtype], False, f"{dtype}, {shape}")

    def test_rope_write_kv_casts_to_the_dtype_of_the_cache(self) -> None:
        """A cache of another dtype, float8 too, receives k and v cast, or is refused with an error. What it can hold
        exactly it then holds exactly."""
        dtype = self.dtypes()[0]
        kernel = self.kernel("rope_write_kv", dtype=dtype)
        for cache_dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            case = step.cache_case((4, 2, 16, 16, 16), 4, self.torch_device, dtype, cache_dtype)
            if cache_dtype == torch.float8_e5m2:  # three significant bits
                case.projection.copy_(case.projection.sign())
            try:
                step.check_cache_write(kernel, case, ROUNDOFF[dtype], False, f"a cache of {cache_dtype}")
            except (ValueError, TypeError) as error:
                assert str(error), "refused without a word"

    def test_step_inputs_equal_their_definition(self) -> None:
        """step_inputs says where each token of a step stands, what it is and where it is cached, copies block tables,
        and advances num_computed; padding is id 0, position 0, slot -1. Two steps in a row, any mixture of rows."""
        kernel = self.kernel("step_inputs")
        for name, case in step.STEP_CASES.items():
            step.check_step_inputs(kernel, case, self.torch_device, name)

    # Drawing

    def test_argmax_gives_the_lowest_id(self) -> None:
        """argmax gives the largest logit and, of equal ones, the lowest id; infinite ones too."""
        sampling.check_argmax(self.kernel("argmax"), self.torch_device)

    def test_argmax_shows_a_nan(self) -> None:
        """A NaN anywhere in a row makes its value NaN, with a valid id, and leaves other rows alone."""
        sampling.check_argmax_of_nan(self.kernel("argmax"), self.torch_device)

    def test_penalize_equals_its_definition(self) -> None:
        """penalize divides positive logits and multiplies others, then subtracts, in the rows of `local` alone; a logit
        without a penalty stays what it was, bit for bit."""
        sampling.check_penalize(self.kernel("penalize"), self.torch_device)

    @pytest.mark.parametrize("filters", ["none", "min_p", "top_k", "top_p", "all"])
    def test_draw_inverts_the_distribution(self, filters: str) -> None:
        """draw gives the token that the noise picks in vocabulary order out of what temperature, min_p, top_k and top_p
        leave, and never one that they took away."""
        sampling.check_draw(self.kernel("draw"), self.torch_device, filters)

    def test_draw_orders_equal_tokens_by_id(self) -> None:
        """Of tokens with equal logits the filters keep the lowest ids, never one more than they may."""
        sampling.check_draw_ties(self.kernel("draw"), self.torch_device)

    def test_draw_from_a_flat_row(self) -> None:
        """What top_p and top_k keep is exact also when it is thousands of tokens."""
        sampling.check_flat_nucleus(self.kernel("draw"), self.torch_device)

    def test_draw_survives_faulty_rows(self) -> None:
        """A row with NaN or an infinite best logit gives a valid id; rows beside it draw what they draw without it."""
        sampling.check_faulty_rows(self.kernel("draw"), self.torch_device)

    @pytest.mark.parametrize("count", [0, 1, 5, 20])
    def test_gather_logprobs_equals_its_definition(self, count: int) -> None:
        """gather_logprobs gives the chosen token, then the best ones, equal ones by id, with log-probabilities of at
        least -9999 and ranks that count strictly greater logits; no more than the vocabulary has."""
        sampling.check_gather(self.kernel("gather_logprobs"), self.torch_device, count)

    def test_gather_logprobs_of_nan(self) -> None:
        """A row with NaN has log-probabilities of -9999, and leaves other rows alone."""
        sampling.check_gather_of_nan(self.kernel("gather_logprobs"), self.torch_device)

    # All of them

    def test_rows_do_not_leak(self) -> None:
        """A row that holds NaN makes no other row NaN."""
        kernel = self.kernel("rms_norm", "linear", *GATED_OPS)
        dtype = self.dtypes()[0]
        x = self.normal(5, 64, dtype=dtype)
        x[2, 10] = math.nan
        out = self._call(kernel, x)
        assert out[[0, 1, 3, 4]].isfinite().all() and out[2].isnan().any()

    def test_results_are_not_overwritten(self) -> None:
        """A result stays what it is when the kernel is called again, and when its inputs are reused."""
        kernel = self.kernel("rms_norm", "linear", *GATED_OPS)
        dtype = self.dtypes()[0]
        x = self.normal(5, 64, dtype=dtype)
        first = self._call(kernel, x)
        kept = first.clone()
        self._call(kernel, self.normal(5, 64, seed=9, dtype=dtype))
        x.fill_(7.0)
        assert torch.equal(first, kept)

    def test_strided_rows_are_right_or_refused(self) -> None:
        """Rows that do not follow each other in memory are computed rightly, or refused with an error."""
        kernel = self.kernel("rms_norm", "linear", *GATED_OPS)
        dtype = self.dtypes()[0]
        wide = self.normal(5, 100, dtype=dtype)
        strided = wide[:, 10:74]
        try:
            found = self._call(kernel, strided)
        except (ValueError, TypeError, RuntimeError) as error:
            assert str(error), "refused without a word"
            return
        torch.testing.assert_close(found, self._call(kernel, strided.contiguous()), rtol=1e-5, atol=1e-6)

    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        """A row's result has the same bits whatever stands in the other rows; but for products, also whatever their
        number."""
        op = self.op_name()
        self.kernel(*pool.OPS)
        for dtype in self.dtypes():
            kernel = self.kernel(op, dtype=dtype)
            whole = pool.call(op, kernel, list(range(pool.POOL)), self.torch_device, dtype)
            batches = ([0, 5, 2, 5, 4, 1],) if op == "linear" else ([3], [4, 0, 1, 5, 2, 3, 0])
            for batch in batches:
                for result, again in zip(whole, pool.call(op, kernel, batch, self.torch_device, dtype), strict=True):
                    for at, row in enumerate(batch):
                        if op != "linear" or at == row:
                            assert _same_bits(again[at], result[row]), f"{dtype}: row {row} of {batch} differs"

    def _call(self, kernel: Any, x: Tensor) -> Tensor:
        """Any op that takes one matrix, on x [T, 64]."""
        if self.op_name() == "linear":
            linear: LinearKernel = kernel
            return linear.apply(x, linear.pack(self.normal(24, 64, seed=1, dtype=x.dtype)), None)
        out: Tensor = (
            kernel(x, self.normal(64, seed=1, dtype=x.dtype), EPS) if self.op_name() == "rms_norm" else kernel(x)
        )
        return out


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """rms_norm in float64, on the CPU."""
    wide = x.cpu().double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.cpu().double()


def unchanged(function: Callable[..., Any], *inputs: Any) -> Tensor:
    """Calls it; its tensors must be the same afterwards, and the result must be a new one."""
    before = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    out: Tensor = function(*inputs)
    for x, old in zip(inputs, before, strict=True):
        if isinstance(x, Tensor):
            assert torch.equal(x, old), "it changed its input"
            assert out.data_ptr() != x.data_ptr(), "the result is its input, not a new tensor"
    return out


def check(
    found: Tensor,
    exact: Tensor,
    *,
    shape: tuple[int, int],
    dtype: torch.dtype,
    roundings: int = 1,
    slack: Tensor | float = 0.0,
) -> None:
    """Within float32 arithmetic and so many roundings to dtype."""
    assert found.shape == exact.shape and found.dtype == dtype, f"{found.dtype} {list(found.shape)}"
    bound = (ARITHMETIC + ROUNDOFF[dtype] * roundings * 1.02) * exact.abs() + slack + 1e-30
    if dtype == torch.float16:
        bound = bound + 2.0**-24 * roundings  # below 2^-14 its numbers are evenly spaced
    worst = ((found.cpu().double() - exact).abs() / bound).nan_to_num(math.inf).max()
    assert worst <= 1, f"{dtype} {list(shape)}: {float(worst):.1f} times the error that rounding explains"


def check_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    """Relative to the sum of the magnitudes, not to a result that cancels. dtype: the coarsest rounding allowed."""
    terms = [term.cpu().double() for term in (x, weight, bias) if term is not None]
    exact = F.linear(*terms)
    size = F.linear(*(term.abs() for term in terms))
    bound = size * 1e-6 * max(1.0, math.sqrt(x.shape[1]) / 4) + exact.abs() * ROUNDOFF[dtype] * 2.04 + 1e-30
    worst = ((found.cpu().double() - exact).abs() / bound).nan_to_num(math.inf).max()
    where = f"{list(x.shape)} times {list(weight.shape)} transposed, {dtype}"
    assert worst <= 1, f"{where}: {float(worst):.1f} times the error that rounding explains"


def check_gated(found: Tensor | None, x: Tensor, weight: Tensor, op: str) -> None:
    """found: what apply_gated gave; None is right, too. Two roundings, of which the first one goes through the op."""
    if found is None:
        return
    exact, size = _product_and_error(x, weight)
    (gate, up), (gate_error, up_error) = exact.chunk(2, dim=1), size.chunk(2, dim=1)
    active = F.silu(gate) if op == "silu_mul" else F.gelu(gate, approximate="tanh")
    # Neither function's slope exceeds 1.2.
    slack = 1.2 * gate_error * up.abs() + active.abs() * up_error + 1.2 * gate_error * up_error
    check(found, active * up, shape=(len(x), len(weight)), dtype=x.dtype, slack=slack)


def check_sum(found: Tensor, before: Tensor, x: Tensor, weight: Tensor) -> None:
    """found: residual `before` after add_product."""
    exact, error = _product_and_error(x, weight)
    check(found, before.cpu().double() + exact, shape=(len(x), len(weight)), dtype=x.dtype, slack=error)


def _product_and_error(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The product in float64, and how far one that was rounded to x's dtype may be from it."""
    wide, other = x.cpu().double(), weight.cpu().double()
    exact = F.linear(wide, other)
    size = F.linear(wide.abs(), other.abs())
    return exact, size * 1e-6 * max(1.0, math.sqrt(x.shape[1]) / 4) + exact.abs() * ROUNDOFF[x.dtype] * 1.02 + 1e-7


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
