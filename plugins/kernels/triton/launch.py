"""What the launches of all kernels in this folder share.

Programmatic dependent launch (PDL): on Hopper and later a kernel's programs may start while the kernel before it still
runs. A kernel launched so must wait (`tl.extra.cuda.gdc_wait()`) before it touches anything but weights; one that also
says `gdc_launch_dependents()` early lets the next one do the same. Since every kernel here waits in every program, a
kernel that has ended implies that all before it have.

Attention also reads early what was written before the embedding (lengths, tables): that is an ordinary launch, behind
which everything before it has ended. A dependent launch in its place would break this.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from hotswap.core.contracts.kernels import KernelContext

MAX_WARPS = 16


def interpreting() -> bool:
    """Whether kernels run under Triton's interpreter, on the host's memory."""
    return bool(triton.knobs.runtime.interpret)


def use_pdl(context: KernelContext) -> bool:
    """Whether kernels are to be launched with programmatic dependent launch on this context's device."""
    device = context.device
    return device.kind == "cuda" and device.capability >= (9, 0) and not interpreting()


def pdl_options(pdl: bool) -> dict[str, bool]:
    """The arguments of a launch; other back ends than CUDA's do not know the option."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


def warps_for(elements: int, per_thread: int) -> int:
    """The warps of a program whose threads take `per_thread` elements each: a power of two."""
    return min(max(next_power_of_two(ceil_div(elements, 32 * per_thread)), 1), MAX_WARPS)


@lru_cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a device; 4 for the interpreter's, so that a persistent grid has several programs there too."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
