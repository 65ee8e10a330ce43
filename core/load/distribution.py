"""Many measured times as a few figures: mean, percentiles, the cumulative curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

PERCENTILES: Final = (50, 90, 95, 99)
QUANTILE_STEPS: Final = 200  # of the curves that a JSON file keeps


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, by linear interpolation: the value at position percent / 100 * (n - 1), counted from 0."""
    if not ordered:
        raise ValueError("no percentile of nothing")
    position = percent / 100 * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of seconds. quantiles: QUANTILE_STEPS + 1 of them, evenly spaced, smallest first: the cumulative curve."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    quantiles: tuple[float, ...]


def distribution(values: Iterable[float]) -> Distribution | None:
    """None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    curve = tuple(percentile(ordered, 100 * step / QUANTILE_STEPS) for step in range(QUANTILE_STEPS + 1))
    return Distribution(
        len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p95, p99, ordered[0], ordered[-1], curve
    )
