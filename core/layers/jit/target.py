"""What the generated code is compiled for: the CPU, its features and the vector shape that kernels use on it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import llvmlite.binding as llvm


@dataclass(frozen=True)
class Target:
    """One compilation target.

    `width` is the number of float32 lanes in a hardware vector and `registers` the number of vector registers; kernels
    derive their register blocking from both. Code for a width that the CPU lacks is still right (LLVM splits or widens
    the vectors), only slower, which is how the other widths are tested on one machine.
    """

    triple: str
    cpu: str
    features: str
    width: int
    registers: int
    has_fma: bool

    def machine(self) -> llvm.TargetMachine:
        """A new LLVM target machine; owned by whoever asked for it."""
        target = llvm.Target.from_triple(self.triple)
        return target.create_target_machine(cpu=self.cpu, features=self.features, opt=2, jit=True)


@functools.cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@functools.cache
def host_target() -> Target:
    """The target of the running machine."""
    _initialize()
    features = llvm.get_host_cpu_features()
    triple = llvm.get_process_triple()
    arm = triple.startswith(("aarch64", "arm64"))
    if features.get("avx512f") and features.get("avx512vl") and features.get("avx512bw"):
        width, registers = 16, 32
    elif features.get("avx2"):
        width, registers = 8, 16
    else:
        width, registers = 4, 32 if arm else 16
    return Target(
        triple=triple,
        cpu=llvm.get_host_cpu_name(),
        features=features.flatten(),
        width=width,
        registers=registers,
        has_fma=arm or bool(features.get("fma")),
    )


def generic_target(triple: str, width: int, *, has_fma: bool) -> Target:
    """The baseline CPU of `triple` (for example "aarch64-unknown-linux-gnu"), to compile for another machine.

    Raises RuntimeError if this LLVM cannot generate code for the triple.
    """
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.Target.from_triple(triple)
    return Target(triple=triple, cpu="", features="", width=width, registers=16, has_fma=has_fma)
