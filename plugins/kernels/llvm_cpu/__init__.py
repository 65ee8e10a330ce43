"""Kernels `llvm_cpu`: vector code generated at start for the host's processor, through LLVM; needs no compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.kernels import KernelContext, KernelProvider

_DTYPES = ("float32", "bfloat16")


def _unavailable(context: KernelContext) -> list[str]:
    reasons = []
    if context.device.kind not in ("cpu", "host"):
        reasons.append(f"it makes code for processors, the device is {context.device.kind}")
    if context.dtype not in _DTYPES:
        reasons.append(f"its dtypes are {' and '.join(_DTYPES)}, not {context.dtype}")
    return reasons


def _linear(context: KernelContext) -> Any:
    from .linear_kernel import LlvmLinear

    return LlvmLinear()


def _elementwise(name: str) -> Callable[[KernelContext], Any]:
    def build(context: KernelContext) -> Any:
        from . import elementwise

        return getattr(elementwise, name)

    return build


def _rope(context: KernelContext) -> Any:
    from .rope import rotary_embedding

    return rotary_embedding


def _rope_write_kv(context: KernelContext) -> Any:
    from .rope import rope_write_kv

    return rope_write_kv


@hookimpl
def hotswap_kernels() -> Iterator[KernelProvider]:
    builders: dict[str, Callable[[KernelContext], Any]] = {
        "linear": _linear,
        "rope": _rope,
        "rope_write_kv": _rope_write_kv,
    }
    for op in ("rms_norm", "add_rms_norm", "silu_mul", "gelu_tanh_mul"):
        builders[op] = _elementwise(op)
    for op, build in builders.items():
        yield KernelProvider(
            name="llvm_cpu",
            op=op,
            build=build,
            unavailable=_unavailable,
            priority=10,
            summary="Vector code made for this processor at start; the same bits whatever else is in the batch.",
        )
