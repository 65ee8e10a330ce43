"""Kernels `triton`: every op in Triton, for NVIDIA and AMD cards; on Hopper they overlap through dependent launches."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.kernels import KernelContext, KernelProvider

_DTYPES = ("bfloat16", "float16", "float32")
_DEVICES = ("cuda", "rocm")
# Ops that take the flag `pdl` beside their arguments, by the module that holds them.
_ELEMENTWISE = {
    "norm": ("rms_norm", "add_rms_norm"),
    "rope": ("rope", "rope_write_kv"),
    "activation": ("silu_mul", "gelu_tanh_mul"),
    "step_inputs": ("step_inputs",),
}
_SAMPLING = ("argmax", "penalize", "draw", "gather_logprobs")


def _unavailable(context: KernelContext) -> list[str]:
    reasons = []
    if context.device.kind not in _DEVICES:
        reasons.append(f"it makes code for GPUs, the device is {context.device.kind}")
    if importlib.util.find_spec("triton") is None:
        reasons.append("the package triton is not installed: pip install 'hotswap[triton]'")
    if context.dtype not in _DTYPES:
        reasons.append(f"its dtypes are {', '.join(_DTYPES)}, not {context.dtype}")
    return reasons


def _linear(context: KernelContext) -> Any:
    from .linear import build_linear

    return build_linear(context)


def _sampling(context: KernelContext) -> Any:
    from . import sampling

    return getattr(sampling, context.op)


def _elementwise(module: str) -> Callable[[KernelContext], Any]:
    def build(context: KernelContext) -> Any:
        from .launch import use_pdl

        function = getattr(importlib.import_module(f".{module}", __name__), context.op)
        return partial(function, pdl=use_pdl(context))

    return build


@hookimpl
def hotswap_kernels() -> Iterator[KernelProvider]:
    builders: dict[str, Callable[[KernelContext], Any]] = {"linear": _linear}
    for module, ops in _ELEMENTWISE.items():
        builders.update(dict.fromkeys(ops, _elementwise(module)))
    builders.update(dict.fromkeys(_SAMPLING, _sampling))
    for op, build in builders.items():
        yield KernelProvider(
            name="triton",
            op=op,
            build=build,
            unavailable=_unavailable,
            priority=10,
            summary="Triton kernels for NVIDIA and AMD cards, compiled when first used.",
        )
