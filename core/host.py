"""A bare guess about this host, for what must be answered before a platform is built. Reads files; opens no device."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from .contracts.provider import DeviceInfo

_CPUINFO = Path("/proc/cpuinfo")


def guess_device(cpuinfo: Path = _CPUINFO) -> DeviceInfo:
    """The CPU: its name and instruction sets as Linux calls them ("avx2", "avx512_bf16"), and all of the memory.

    The chosen platform's `probe` knows better (cgroups, accelerators).
    """
    facts = _first_processor(cpuinfo)
    flags = facts.get("flags") or facts.get("Features") or ""
    return DeviceInfo(
        kind="cpu",
        name=facts.get("model name") or platform.processor() or platform.machine(),
        memory_bytes=_memory_bytes(),
        features=frozenset(flags.split()),
    )


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux: a name and no features is all there is to guess
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # the names are not known everywhere
        return 0
