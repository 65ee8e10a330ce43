"""The kernels of `llvm_cpu`, and the core's own references, pass the conformance suite."""

from __future__ import annotations

from typing import Any

from hotswap.core.contracts import KernelProvider
from hotswap.core.layers.ops import OpTable
from hotswap.core.testing.suites import KernelsSuite

LLVM_CPU = "hotswap.plugins.kernels.llvm_cpu"


def reference(op: str) -> KernelProvider:
    """What runs where no kernel can."""
    kernel: Any = getattr(OpTable.reference(), op)
    return KernelProvider(name="core_reference", op=op, build=lambda context: kernel, summary="the core's reference")


class TestLlvmLinear(KernelsSuite):
    plugin = LLVM_CPU
    op = "linear"


class TestLlvmRmsNorm(KernelsSuite):
    plugin = LLVM_CPU
    op = "rms_norm"


class TestLlvmAddRmsNorm(KernelsSuite):
    plugin = LLVM_CPU
    op = "add_rms_norm"


class TestLlvmRope(KernelsSuite):
    plugin = LLVM_CPU
    op = "rope"


class TestLlvmRopeWriteKv(KernelsSuite):
    plugin = LLVM_CPU
    op = "rope_write_kv"


class TestLlvmSiluMul(KernelsSuite):
    plugin = LLVM_CPU
    op = "silu_mul"


class TestLlvmGeluTanhMul(KernelsSuite):
    plugin = LLVM_CPU
    op = "gelu_tanh_mul"


class TestReferenceLinear(KernelsSuite):
    plugin = reference("linear")


class TestReferenceRmsNorm(KernelsSuite):
    plugin = reference("rms_norm")


class TestReferenceAddRmsNorm(KernelsSuite):
    plugin = reference("add_rms_norm")


class TestReferenceRope(KernelsSuite):
    plugin = reference("rope")


class TestReferenceSiluMul(KernelsSuite):
    plugin = reference("silu_mul")


class TestReferenceGeluTanhMul(KernelsSuite):
    plugin = reference("gelu_tanh_mul")


class TestReferenceRopeWriteKv(KernelsSuite):
    plugin = reference("rope_write_kv")


class TestReferenceStepInputs(KernelsSuite):
    plugin = reference("step_inputs")


class TestReferenceArgmax(KernelsSuite):
    plugin = reference("argmax")


class TestReferencePenalize(KernelsSuite):
    plugin = reference("penalize")


class TestReferenceDraw(KernelsSuite):
    plugin = reference("draw")


class TestReferenceGatherLogprobs(KernelsSuite):
    plugin = reference("gather_logprobs")
