"""What the host grants this process: cores, memory, instruction sets. Pure functions over the kernel's text files; no
torch.

Every function takes the root under which it reads, so that tests can bring a host of their own.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

# /proc/cpuinfo's flag -> the name that `DeviceInfo.features` uses. x86 first, then Arm.
_FEATURES = {
    "avx2": "avx2",
    "fma": "fma",
    "avx512f": "avx512",
    "avx512_bf16": "avx512_bf16",
    "avx512_vnni": "avx512_vnni",
    "amx_bf16": "amx_bf16",
    "amx_int8": "amx_int8",
    "asimd": "neon",
    "bf16": "arm_bf16",
    "i8mm": "arm_i8mm",
    "sve": "sve",
}


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes: what this process may use at all, and what of it is free or can be reclaimed at once."""

    total: int
    available: int


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None  # this kernel or this cgroup version has no such file


def _read_int(path: Path) -> int | None:
    text = _read(path)
    try:
        return int(text.split()[0]) if text and text.split() else None
    except ValueError:
        return None  # "max": no limit


def cpu_model(root: Path = ROOT) -> str:
    """A processor's name for humans."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_features(root: Path = ROOT) -> frozenset[str]:
    """Instruction sets that kernels ask about."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(_FEATURES[flag] for flag in value.split() if flag in _FEATURES)
    return frozenset()


def _cgroup_folders(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """(cgroup version, folder) of this process and of every ancestor: a limit anywhere above holds as well.

    In a container the path in /proc/self/cgroup may name a folder of the host that is not mounted here; then the
    mount's own root stands for this process.
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0" and not controllers:
            version, mounts = 2, ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            version, mounts = 1, [f"sys/fs/cgroup/{controller}", f"sys/fs/cgroup/{controllers}"]
        else:
            continue
        for mount in (root / name for name in mounts):
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(parts), -1, -1):
                folder = mount.joinpath(*parts[:depth])
                if folder.is_dir():
                    yield version, folder


def _quota(root: Path) -> float | None:
    """Cores' worth of time that the tightest cgroup grants, or None."""
    quotas = []
    for version, folder in _cgroup_folders("cpu", root):
        if version == 2:
            words = (_read(folder / "cpu.max") or "max").split()
            if len(words) == 2 and words[0] != "max":
                quotas.append(int(words[0]) / int(words[1]))
        else:
            quota, period = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
            if quota is not None and period and quota > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


def usable_cores(root: Path = ROOT) -> int:
    """Cores that this process may run on, at least 1. A fractional quota is rounded down: a thread that the kernel
    keeps throttling holds up all the others."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def host_memory(root: Path = ROOT) -> HostMemory:
    """The smaller of the machine's memory and every cgroup limit. Page cache that a cgroup can drop counts as
    available."""
    facts = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if value.split():
            facts[name] = int(value.split()[0]) * 1024
    if "MemTotal" in facts:
        total = facts["MemTotal"]
        available = facts.get("MemAvailable", facts.get("MemFree", total))
    else:
        total = available = _sysconf_memory()
    for version, folder in _cgroup_folders("memory", root):
        limit = _read_int(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        used = _read_int(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if limit is None or limit >= total:
            continue  # version 1 says "no limit" with a number near 2**63
        total = limit
        available = min(available, limit - (used or 0) + _droppable(folder, version))
    return HostMemory(total, max(0, min(available, total)))


def _droppable(folder: Path, version: int) -> int:
    """Bytes of inactive page cache that the cgroup is charged for."""
    wanted = "inactive_file" if version == 2 else "total_inactive_file"
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == wanted:
            return int(value)
    return 0


def _sysconf_memory() -> int:
    """The machine's memory where there is no /proc (macOS)."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
