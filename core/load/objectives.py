"""Service level objectives: the longest times that an answer may take and still count as good."""

from __future__ import annotations

import contextlib
import math
import re
from typing import Final

from ..errors import UsageError

MEASURES: Final = ("ttft", "tpot", "e2e")
_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_PART: Final = re.compile(r"(\w+)[:=](.*?)(us|ms|s|m)")


def parse_limits(text: str) -> dict[str, float]:
    """`ttft:500ms,tpot:50ms,e2e:10s` (or with `=`) as seconds by measure; units us, ms, s, m. Raises UsageError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        name, seconds = (found[1] if found else ""), math.nan
        if found is not None:
            with contextlib.suppress(ValueError):  # said below, with everything else that can be wrong with it
                seconds = float(found[2]) * _UNITS[found[3]]
        if name not in MEASURES or not 0 < seconds < math.inf or name in limits:
            raise UsageError(f"SLO {part.strip()!r}: write it as ttft:500ms,tpot:50ms,e2e:10s (each at most once)")
        limits[name] = seconds
    return limits
