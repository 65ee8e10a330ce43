"""Victim rule `lowest_priority`: the worst class yields first, and within it the latest arrival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.policy import RequestView
from hotswap.core.contracts.provider import Provider
from hotswap.core.contracts.victim import VictimRule


class LowestPriority(VictimRule):
    """The highest class value, then the latest arrival."""

    def choose(self, candidates: Sequence[RequestView], num_blocks_needed: int) -> RequestView:
        return max(candidates, key=lambda view: (view.priority, view.arrival_time, view.request_id))


@hookimpl
def hotswap_victim() -> Iterator[Provider[VictimRule]]:
    yield Provider(
        name="lowest_priority",
        build=lambda context: LowestPriority(),
        summary="the worst class yields, latest arrival first",
    )
