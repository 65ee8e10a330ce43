"""JIT toolkit: CPU kernels written in Python, compiled by LLVM in the engine process when they are first used.

`builder` and `values` are the language, `vecmath` its mathematics, `parallel` and `pool` its threads, `compiler` turns
it into machine code for a `target`. Import it only in processes that run a model: it needs torch and llvmlite.
"""

from __future__ import annotations

from .builder import Buffer, Function, Module, Var, pair_position, round_to_bf16, through_bf16, unpair
from .compiler import CompiledModule, assembly, compile_module, stats
from .parallel import Team, parallel_function
from .pool import team_size
from .target import Target, generic_target, host_target
from .values import Val
from .vecmath import exp, sigmoid, tanh

__all__ = [
    "Buffer",
    "CompiledModule",
    "Function",
    "Module",
    "Target",
    "Team",
    "Val",
    "Var",
    "assembly",
    "compile_module",
    "exp",
    "generic_target",
    "host_target",
    "pair_position",
    "parallel_function",
    "round_to_bf16",
    "sigmoid",
    "stats",
    "tanh",
    "team_size",
    "through_bf16",
    "unpair",
]
