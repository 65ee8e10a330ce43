"""From LLVM IR to callable machine code, in process, without a C compiler and without files."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import llvmlite.binding as llvm

from .builder import Module

# MCJIT is not thread safe while it generates code, and the totals below are shared. Reentrant: building a parallel
# kernel compiles the thread pool first.
_lock = threading.RLock()


@dataclass
class CompileStats:
    """How much was compiled in this process, and what it took (seconds)."""

    modules: int = 0
    seconds: float = 0.0
    by_name: dict[str, float] = field(default_factory=dict)


stats = CompileStats()

# c_void_p for int64 too: it takes the same register, and ctypes converts an int to it in half the time.
_CTYPES = {"ptr": ctypes.c_void_p, "i64": ctypes.c_void_p, "i32": ctypes.c_int32, "f32": ctypes.c_float}


class CompiledModule:
    """Machine code of one module. The code lives as long as this object."""

    def __init__(self, engine: llvm.ExecutionEngine) -> None:
        self._engine = engine

    def address(self, name: str) -> int:
        """Address of the function `name`. Raises KeyError if the module has none."""
        address = int(self._engine.get_function_address(name))
        if not address:
            raise KeyError(f"the compiled module has no function {name!r}")
        return address

    def function(self, name: str, params: Sequence[str], *, keep_gil: bool = False) -> Callable[..., None]:
        """The function `name` as a Python callable that takes plain ints (pointers too) and floats.

        `params` are type names ("ptr", "i64", "i32", "f32"). With `keep_gil` the call does not release the GIL: for
        calls of a few microseconds, where giving it up could cost a whole switch interval. The caller must keep the
        module.
        """
        factory: Any = ctypes.PYFUNCTYPE if keep_gil else ctypes.CFUNCTYPE
        prototype = factory(None, *(_CTYPES[p] for p in params))
        function: Callable[..., None] = prototype(self.address(name))
        return function


def _optimized(source: Module, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    module = llvm.parse_assembly(str(source.ir))
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=1)
    # Kernels state their own vectors and unrolling; the passes would only undo the register blocking, slowly.
    tuning.loop_vectorization = False
    tuning.slp_vectorization = False
    tuning.loop_unrolling = False
    tuning.loop_interleaving = False
    builder = llvm.create_pass_builder(machine, tuning)
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_new_gvn_pass()
    passes.run(module, builder)
    return module


@contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage collection inside: the builder makes many small objects and keeps them all, so that collections, each
    over all that torch has loaded, would take longer than the building."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compile_module(build: Callable[[], Module]) -> CompiledModule:
    """Compiles the module that `build` makes; its target must be able to run here.

    Raises RuntimeError with LLVM's message if the IR is malformed.
    """
    with _lock, _without_collections():
        start = time.perf_counter()
        module = build()
        machine = module.target.machine()
        engine = llvm.create_mcjit_compiler(_optimized(module, machine), machine)
        engine.finalize_object()
        spent = time.perf_counter() - start
        stats.modules += 1
        stats.seconds += spent
        stats.by_name[module.name] = stats.by_name.get(module.name, 0.0) + spent
    return CompiledModule(engine)


def assembly(module: Module) -> str:
    """The optimised assembly of `module`, whose target need not be able to run here."""
    machine = module.target.machine()
    return str(machine.emit_assembly(_optimized(module, machine)))
