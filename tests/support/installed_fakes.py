"""Puts fakes of kernel packages, from fake_kernels/, where Python finds packages; takes them away again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotswap.core.contracts.provider import DeviceInfo

FAKES = Path(__file__).parent / "fake_kernels"
HOPPER = DeviceInfo(kind="cuda", name="a Hopper card of paper", capability=(9, 0), memory_bytes=80 << 30)

_PACKAGES = ("flash_attn", "flash_attn_2_cuda", "flash_attn_interface", "cutlass", "flashinfer")


@contextmanager
def installed(*names: str) -> Iterator[None]:
    """names: folders of fake_kernels/ ("fa2", "fa3", "fa4", "flashinfer"). The packages that none of them has seem not to be
    installed."""
    before, modules = list(sys.path), _take_away()
    sys.path[:0] = [str(FAKES / name) for name in names]
    found = {entry.stem for name in names for entry in (FAKES / name).iterdir()}
    absent: dict[str, Any] = {name: None for name in _PACKAGES if name not in found}
    sys.modules.update(absent)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
        _take_away()
        sys.modules.update(modules)
        importlib.invalidate_caches()


def _take_away() -> dict[str, Any]:
    named = [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]
    return {name: sys.modules.pop(name) for name in named}
