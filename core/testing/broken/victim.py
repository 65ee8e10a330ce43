"""Victim rules with one fault each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

from ...contracts.policy import RequestView
from ...contracts.provider import Provider
from ...contracts.victim import VictimRule
from . import BrokenSample


class RemembersTheLast(VictimRule):
    """Names whom it named before, whether that one is offered or not."""

    def __init__(self) -> None:
        self._last: list[RequestView] = []

    def choose(self, candidates: Sequence[RequestView], num_blocks_needed: int) -> RequestView:
        if self._last:
            return self._last.pop()
        if len(candidates) > 1:
            self._last = [candidates[-1]]
        return candidates[-1]


class SortsInPlace(VictimRule):
    """Sorts the core's own sequence."""

    def choose(self, candidates: Sequence[RequestView], num_blocks_needed: int) -> RequestView:
        candidates.sort(key=lambda view: (-view.arrival_time, -view.request_id))  # type: ignore[attr-defined]
        return candidates[0]


class TakesTurns(VictimRule):
    """Its answer depends on how often any rule of the process was asked."""

    _turn = itertools.count()

    def choose(self, candidates: Sequence[RequestView], num_blocks_needed: int) -> RequestView:
        return candidates[next(self._turn) * 7919 % 13 % len(candidates)]


class GivesAnId(VictimRule):
    """Names the request's id, not the request."""

    def choose(self, candidates: Sequence[RequestView], num_blocks_needed: int) -> RequestView:
        return candidates[-1].request_id  # type: ignore[return-value]


class KeepsVictims(VictimRule):
    """Keeps everyone whom it ever chose."""

    def __init__(self) -> None:
        self._victims: list[RequestView] = []

    def choose(self, candidates: Sequence[RequestView], num_blocks_needed: int) -> RequestView:
        self._victims.append(candidates[-1])
        return candidates[-1]


class SparesTheTired(VictimRule):
    """Spares whoever was preempted often, and then has nobody to name."""

    def choose(self, candidates: Sequence[RequestView], num_blocks_needed: int) -> RequestView:
        return next(view for view in reversed(candidates) if view.num_preemptions < 3)


def _sample(name: str, make: Callable[[], VictimRule], caught_by: str) -> BrokenSample:
    provider: Provider[VictimRule] = Provider(
        name=name, build=lambda context: make(), summary=f"broken: {name.replace('_', ' ')}"
    )
    return BrokenSample(name, provider, caught_by)


BROKEN: Final[tuple[BrokenSample, ...]] = (
    _sample("remembers_the_last", RemembersTheLast, "chooses_one_of_the_candidates"),
    _sample("gives_an_id", GivesAnId, "chooses_one_of_the_candidates"),
    _sample("sorts_in_place", SortsInPlace, "leaves_the_candidates_alone"),
    _sample("takes_turns", TakesTurns, "same_calls_give_the_same_choice"),
    _sample("keeps_victims", KeepsVictims, "keeps_no_views"),
    _sample("spares_the_tired", SparesTheTired, "takes_the_only_candidate"),
)
