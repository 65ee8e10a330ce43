"""Time as an object, so that the simulator can supply its own (design.md section 4)."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What scheduling, policies and the cache may ask about time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back. Its zero is arbitrary, but one for all processes of the host."""
        ...


class SystemClock:
    """The host's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves when told: for tests and the simulator."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves time forward. Raises ValueError on a negative step."""
        if seconds < 0:
            raise ValueError(f"time cannot go back: advance({seconds})")
        self._now += seconds

    def advance_to(self, moment: float) -> None:
        """Moves time to `moment`, exactly. Raises ValueError when that has passed."""
        if moment < self._now:
            raise ValueError(f"time cannot go back: advance_to({moment}) at {self._now}")
        self._now = moment
