"""When requests arrive. Every process starts with a request at 0 and has the mean gap 1 / rate."""

from __future__ import annotations

import math
from random import Random
from typing import Final, Literal, get_args

from ..errors import UsageError

Process = Literal["poisson", "uniform", "bursty"]
PROCESSES: Final[tuple[str, ...]] = get_args(Process)


def arrival_times(process: Process, rate: float, count: int, random: Random, *, burstiness: float = 1.0) -> list[float]:
    """`count` ascending times.

    poisson: independent exponential gaps. uniform: every gap is 1 / rate. bursty: independent gaps of a gamma
    distribution with shape `burstiness`, so that their coefficient of variation is 1 / sqrt(burstiness): 1 is poisson,
    below 1 requests come in bursts, above 1 more evenly. An infinite rate: all at 0. Raises UsageError.
    """
    if not rate > 0 or math.isnan(rate):
        raise UsageError(f"the request rate must be above 0 (or inf: all at once), got {rate}")
    if not 0 < burstiness < math.inf:
        raise UsageError(f"the burstiness must be above 0, got {burstiness}")
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        if process == "uniform":
            now += 1 / rate
        else:
            shape = burstiness if process == "bursty" else 1.0
            now += random.gammavariate(shape, 1 / (rate * shape))
    return times
