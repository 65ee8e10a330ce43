"""Requests of a simulation: sizes, arrivals, and which of them begin alike. No text: a token id stands for a stretch of text.

A prompt is a few runs of equal token ids. Ids of stretches that several prompts share are small, each request's own id begins
at OWN_TOKENS: two prompts have the same blocks exactly as far as they begin with the same runs. So the prefix index hashes
real tokens, as in the engine, and making them costs next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..errors import UsageError

OWN_TOKENS: Final = 1 << 31
VOCABULARY: Final = 1 << 32  # token ids are unsigned 32-bit integers to the prefix index

Run = tuple[int, int]  # token id, how many in a row


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """arrival: seconds from the beginning. shared: the prompt's first tokens, as runs of ids below OWN_TOKENS; the rest
    is the request's own. session: requests of one conversation, in order: each waits for the answer to the one
    before, and its prompt begins with that one's prompt and answer. output_tokens: at least 1."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    shared: tuple[Run, ...] = ()
    user: str = ""
    priority: int = 0
    session: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """requests: in order of arrival. source: where they come from. notes: what the reader should know of how they were
    read."""

    source: str
    requests: tuple[SimulatedRequest, ...]
    notes: tuple[str, ...] = ()

    def first(self, count: int | None) -> Workload:
        """The first `count` requests; all of them for None."""
        return replace(self, requests=self.requests[:count])

    def faster(self, speed: float) -> Workload:
        """speed: 2 halves every arrival time. Raises UsageError."""
        if not 0 < speed < math.inf:
            raise UsageError(f"--trace-speed {speed}: a number above 0 is needed")
        if speed == 1:
            return self
        return replace(self, requests=tuple(replace(r, arrival=r.arrival / speed) for r in self.requests))


def tokens_of(runs: Iterable[Run]) -> list[int]:
    """The token ids themselves."""
    tokens: list[int] = []
    for token, count in runs:
        tokens += [token] * count
    return tokens


def prompt_runs(begin: Sequence[Run], prompt_tokens: int, own: int, *, least_own: int = 0) -> list[Run]:
    """A prompt of `prompt_tokens` tokens that begins with `begin` and goes on with the request's own token; longer when
    `begin` and `least_own` own tokens are."""
    missing = max(least_own, prompt_tokens - sum(count for _, count in begin))
    return [*begin, (own, missing)] if missing else list(begin)
