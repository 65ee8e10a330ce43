"""The kernels of `triton` pass the conformance suite under Triton's interpreter, on the CPU.

bfloat16 is left to tests/gpu: the interpreter truncates where the card rounds.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.testing.suites import KernelsSuite

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs Triton and its interpreter (TRITON_INTERPRET=1, the default without a GPU)", allow_module_level=True
    )

INTERPRETER = DeviceInfo(kind="cuda", name="Triton's interpreter", capability=(9, 0))


class Interpreted(KernelsSuite):
    plugin = "hotswap.plugins.kernels.triton"
    device = INTERPRETER

    def dtypes(self) -> list[torch.dtype]:
        return [dtype for dtype in super().dtypes() if dtype != torch.bfloat16]


class TestInterpretedLinear(Interpreted):
    op = "linear"


class TestInterpretedRmsNorm(Interpreted):
    op = "rms_norm"


class TestInterpretedAddRmsNorm(Interpreted):
    op = "add_rms_norm"


class TestInterpretedRope(Interpreted):
    op = "rope"


class TestInterpretedRopeWriteKv(Interpreted):
    op = "rope_write_kv"


class TestInterpretedSiluMul(Interpreted):
    op = "silu_mul"


class TestInterpretedGeluTanhMul(Interpreted):
    op = "gelu_tanh_mul"


class TestInterpretedStepInputs(Interpreted):
    op = "step_inputs"


class TestInterpretedArgmax(Interpreted):
    op = "argmax"


class TestInterpretedPenalize(Interpreted):
    op = "penalize"


class TestInterpretedDraw(Interpreted):
    """A row with filters is sixteen programs, and each takes the interpreter a while: the checks of many rows are `full`,
    and so is the slowest filter, which "all" and a flat row have too. tests/unit/test_triton_sampling.py has few rows of
    each."""

    op = "draw"

    @pytest.mark.parametrize(
        "filters", ["none", "min_p", pytest.param("top_k", marks=pytest.mark.full), "top_p", "all"]
    )
    def test_draw_inverts_the_distribution(self, filters: str) -> None:
        super().test_draw_inverts_the_distribution(filters)

    @pytest.mark.full
    def test_draw_orders_equal_tokens_by_id(self) -> None:
        super().test_draw_orders_equal_tokens_by_id()

    @pytest.mark.full
    def test_a_row_does_not_depend_on_its_batch(self) -> None:
        super().test_a_row_does_not_depend_on_its_batch()


class TestInterpretedGatherLogprobs(Interpreted):
    op = "gather_logprobs"
