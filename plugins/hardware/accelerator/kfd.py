"""AMD's cards as the kernel's compute driver (amdkfd) lists them in sysfs. Opens no device.

Every function takes the root under which it reads. The files are those of the kernel's amdkfd topology: a folder for each node,
a node with `simd_count` above 0 is a card.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .cards import Card, Host, hide

ROOT = Path("/")

_NODES = "sys/class/kfd/kfd/topology/nodes"
_DEVICE_MEMORY = ("1", "2")  # heap types: memory of the card that the host sees, and that it does not

# By LLVM's names of the processors. MI300 has the float8 types without negative zero; its successors have OCP's.
_FNUZ = ("gfx940", "gfx941", "gfx942")
_OCP_FLOAT8 = ("gfx950", "gfx1200", "gfx1201")
_NO_BFLOAT16 = ("gfx900", "gfx902", "gfx904", "gfx906", "gfx1010", "gfx1011", "gfx1012")


def amd_host(root: Path, environment: Mapping[str, str]) -> Host:
    """The cards that HIP would show to this process."""
    if not (root / _NODES).is_dir():
        return Host(problems=("no AMD driver was found (the kernel has no /sys/class/kfd)",))
    folders = sorted((root / _NODES).iterdir(), key=lambda folder: int(folder.name) if folder.name.isdecimal() else 0)
    cards = tuple(card for card in (_card(root, folder) for folder in folders) if card is not None)
    if not cards:
        return Host(problems=("the AMD driver is there, but no card",))
    if not os.access(root / "dev/kfd", os.R_OK | os.W_OK):
        return Host(problems=("/dev/kfd cannot be opened; the user must be in the groups render and video",))
    host = hide(Host(cards), "ROCR_VISIBLE_DEVICES", environment.get("ROCR_VISIBLE_DEVICES"))
    # HIP counts what the runtime below has left; CUDA's name of the variable counts where HIP's own is not set.
    variable = next((name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in environment), None)
    return hide(host, variable, environment[variable]) if variable else host


def _card(root: Path, folder: Path) -> Card | None:
    """None for a node that is no card, or one that this container may not see."""
    facts = _properties(folder / "properties")
    if not int(facts.get("simd_count", "0")):
        return None
    processor = gfx_name(int(facts.get("gfx_target_version", "0")))
    banks = [_properties(bank) for bank in folder.glob("mem_banks/*/properties")]
    memory = sum(int(bank.get("size_in_bytes", "0")) for bank in banks if bank.get("heap_type") in _DEVICE_MEMORY)
    product = root / f"sys/class/drm/renderD{facts.get('drm_render_minor', '')}/device/product_name"
    return Card(
        name=_text(product) or f"AMD {processor}",
        uuid=f"GPU-{int(facts.get('unique_id', '0')):016x}",
        memory_bytes=memory,
        features=_features(processor),
    )


def gfx_name(version: int) -> str:
    """LLVM's name of a processor: 90402 is gfx942, 90010 gfx90a, 110001 gfx1101."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _features(processor: str) -> frozenset[str]:
    features = {processor}
    if processor not in _NO_BFLOAT16:
        features.add("bf16")
    if processor in _FNUZ:
        features.add("fp8_e4m3fnuz")
    if processor in _OCP_FLOAT8:
        features.add("fp8_e4m3fn")
    return frozenset(features)


def _properties(path: Path) -> dict[str, str]:
    """Lines of a name and a number."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # not there, or of a card that this container may not use
        return ""
