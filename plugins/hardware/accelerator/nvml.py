"""NVIDIA's cards through the driver's own library, NVML. Opens no context on a card: that would take memory and break a fork.

Every function takes the library, so that tests can bring one of their own. The calls and structures are those of NVML's API
reference.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping
from typing import Any

from .cards import Card, Host, hide

LIBRARY = "libnvidia-ml.so.1"
MINIMUM_CAPABILITY = (7, 0)  # what Triton and torch's kernels are made for

_TEXT_BYTES = 96
_MIG_ENABLED = 1
_NOT_SUPPORTED = 3

# From this compute capability on.
_FEATURES = {
    "bf16": (8, 0),
    "fp8_e4m3fn": (8, 9),
    "tma": (9, 0),  # the tensor memory accelerator
    "pdl": (9, 0),  # programmatic dependent launch
}


class NvmlError(Exception):
    """A call failed; the text is NVML's own. status: its number."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def load_library() -> Any | None:
    """None where there is no NVIDIA driver."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def nvidia_host(library: Any | None, environment: Mapping[str, str]) -> Host:
    """The cards that CUDA would show to this process. CUDA orders them as NVML does when CUDA_DEVICE_ORDER is PCI_BUS_ID, which
    the platform sets."""
    if library is None:
        return Host(problems=(f"no NVIDIA driver was found ({LIBRARY} cannot be loaded)",))
    try:
        _call(library, "nvmlInit_v2")
    except NvmlError as error:
        return Host(problems=(f"the NVIDIA driver does not answer ({error})",))
    try:
        host = _cards(library)
    except NvmlError as error:
        return Host(problems=(f"the NVIDIA driver does not answer ({error})",))
    finally:
        library.nvmlShutdown()
    return hide(host, "CUDA_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES"))


def _cards(library: Any) -> Host:
    count = ctypes.c_uint()
    _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    version = ctypes.c_int()
    _call(library, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
    host = Host(driver_cuda=(version.value // 1000, version.value % 1000 // 10))
    if not count.value:
        return dataclasses.replace(host, problems=("the NVIDIA driver is there, but no card",))
    cards: list[Card] = []
    problems: list[str] = []
    for index in range(count.value):
        try:
            cards.append(_card(library, index))
        except NvmlError as error:  # a container may hold some of the cards only; CUDA skips the others too
            problems.append(f"card {index} cannot be asked ({error})")
    return dataclasses.replace(host, cards=tuple(cards), problems=tuple(problems))


def _card(library: Any, index: int) -> Card:
    handle = ctypes.c_void_p()
    _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    memory = _Memory()
    _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(library, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    capability = (major.value, minor.value)
    refusals = []
    if capability < MINIMUM_CAPABILITY:
        wanted = ".".join(map(str, MINIMUM_CAPABILITY))
        refusals.append(f"compute capability {major.value}.{minor.value}; {wanted} or newer is needed")
    if _is_sliced(library, handle):
        refusals.append("it is cut into slices (MIG), which are not supported; switch MIG off, or take another card")
    return Card(
        name=_text(library, "nvmlDeviceGetName", handle),
        uuid=_text(library, "nvmlDeviceGetUUID", handle),
        memory_bytes=memory.total,
        capability=capability,
        features=frozenset(name for name, since in _FEATURES.items() if capability >= since),
        refusals=tuple(refusals),
    )


def _is_sliced(library: Any, handle: ctypes.c_void_p) -> bool:
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        _call(library, "nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
    except NvmlError as error:
        if error.status == _NOT_SUPPORTED:
            return False
        raise
    return current.value == _MIG_ENABLED


def _text(library: Any, function: str, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    _call(library, function, handle, buffer, ctypes.c_uint(_TEXT_BYTES))
    return buffer.value.decode(errors="replace")


def _call(library: Any, function: str, *arguments: Any) -> None:
    """Raises NvmlError with NVML's own words."""
    try:
        status = getattr(library, function)(*arguments)
    except AttributeError as error:
        raise NvmlError(f"it is too old to know {function}", _NOT_SUPPORTED) from error
    if status:
        describe = library.nvmlErrorString
        describe.restype = ctypes.c_char_p
        text = describe(ctypes.c_int(status))
        raise NvmlError(f"{function}: {text.decode(errors='replace') if text else status}", status)
