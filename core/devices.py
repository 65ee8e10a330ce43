"""What devices can hold and do, from their makers' data sheets: memory as the driver shows it, peak memory bandwidth, peak
dense bfloat16 arithmetic."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .errors import UsageError
from .host import guess_device

GIB: Final = 1 << 30
_MEMINFO: Final = Path("/proc/meminfo")
# A guess for a machine that nobody has measured: two memory channels, eight cores with wide vectors.
_CPU_BANDWIDTH: Final = 30e9
_CPU_FLOPS: Final = 0.3e12


@dataclass(frozen=True, slots=True)
class Device:
    """memory_bytes: what an engine could use if it were alone. bandwidth: bytes a second; flops: operations a second; None
    when nothing is known. utilization: the share of the memory to plan with. guessed: bandwidth and flops are no data
    sheet's."""

    name: str
    memory_bytes: int
    bandwidth: float | None
    flops: float | None
    utilization: float = 0.9
    guessed: bool = False


def _card(name: str, gib: float, terabytes_a_second: float, teraflops: float) -> Device:
    return Device(name, int(gib * GIB), terabytes_a_second * 1e12, teraflops * 1e12)


# Bandwidth and dense bfloat16 arithmetic of the variant named: NVIDIA's data sheets of the HGX B200, H200 SXM (2024), H100 SXM5
# (2023), A100 SXM4 (80 GB: 2021, 40 GB: 2020), L40S (2023) and L4 (2023); for GeForce cards the architecture whitepapers (Ada
# 2022, GA102 2020). Sheets that give arithmetic "with sparsity" are halved.
DEVICES: Final[dict[str, Device]] = {
    device.name: device
    for device in (
        _card("b200", 179, 8.0, 2250),
        _card("h200", 140, 4.8, 989),
        _card("h100", 79.5, 3.35, 989),
        _card("a100-80g", 80, 2.04, 312),
        _card("a100-40g", 40, 1.55, 312),
        _card("l40s", 45, 0.864, 362),
        _card("l4", 22.5, 0.3, 121),
        _card("rtx4090", 24, 1.008, 165),
        _card("rtx3090", 24, 0.936, 71),
    )
}
ALIASES: Final = {"a100": "a100-80g"}
_OTHERWISE: Final = "for another one give --device-memory GiB with --tpot and --prefill-rate as measured"


def find_device(name: str, available: Callable[[], int] | None = None, *, otherwise: str = _OTHERWISE) -> Device:
    """By name, whatever its case; `cpu` is this machine. Raises UsageError with the nearest name.

    available: bytes of free memory of this machine; measured when not given. otherwise: what the error advises for a device
    that is not in the table.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    wanted = ALIASES.get(wanted, wanted)
    if wanted == "cpu":
        memory = (available or available_memory)()
        return Device("cpu", memory, _CPU_BANDWIDTH, _CPU_FLOPS, utilization=0.6, guessed=True)
    device = DEVICES.get(wanted)
    if device is None:
        near = difflib.get_close_matches(wanted, [*DEVICES, "cpu"], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"--device {name}: not in the table{hint} (known: {', '.join(DEVICES)}, cpu; {otherwise})")
    return device


def available_memory(meminfo: Path = _MEMINFO) -> int:
    """Bytes that this machine could hand out now; all of its memory where that is not told."""
    try:
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux
    return guess_device().memory_bytes
