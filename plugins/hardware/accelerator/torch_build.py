"""What the installed torch was built for, read from its files: to import it takes seconds, and the API process never does."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"""^(__version__|cuda|hip)\s*(?::[^=]*)?=\s*['"]([^'"]+)['"]""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """cuda, hip: versions such as "13.0" and "6.4.43482"; None when it was built without."""

    version: str
    cuda: str | None = None
    hip: str | None = None


def torch_folder() -> Path | None:
    """Where torch is installed; None when it is not."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def torch_build(folder: Path | None) -> TorchBuild | None:
    """From torch/version.py. None when torch is not there."""
    if folder is None:
        return None
    try:
        found = dict(_LINE.findall((folder / "version.py").read_text(encoding="utf-8")))
    except OSError:
        return None
    return TorchBuild(found.get("__version__", "unknown"), found.get("cuda"), found.get("hip"))


def reasons_against_cuda(build: TorchBuild | None, driver_cuda: tuple[int, int]) -> list[str]:
    """Why this torch cannot run NVIDIA's cards with this driver. Within a major version any driver runs any CUDA."""
    if build is None:
        return ["torch is not installed"]
    if build.cuda is None:
        made = "for AMD's cards" if build.hip else "without CUDA"
        return [f"torch {build.version} is built {made}; install a build with CUDA"]
    major = int(build.cuda.partition(".")[0])
    if (0, 0) < driver_cuda < (major, 0):
        has = ".".join(map(str, driver_cuda))
        return [f"torch {build.version} needs a driver for CUDA {major}, this one is for {has}; install a newer driver"]
    return []


def reasons_against_rocm(build: TorchBuild | None) -> list[str]:
    """Why this torch cannot run AMD's cards: `torch.version.hip` decides."""
    if build is None:
        return ["torch is not installed"]
    if build.hip is None:
        return [f"torch {build.version} is built without ROCm; install a build with it"]
    return []
