"""Victim rule `newest`: the request that arrived last has waited least and yields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.policy import RequestView
from hotswap.core.contracts.provider import Provider
from hotswap.core.contracts.victim import VictimRule


class Newest(VictimRule):
    """The latest arrival, whatever its class."""

    def choose(self, candidates: Sequence[RequestView], num_blocks_needed: int) -> RequestView:
        return max(candidates, key=lambda view: (view.arrival_time, view.request_id))


@hookimpl
def hotswap_victim() -> Iterator[Provider[VictimRule]]:
    yield Provider(name="newest", build=lambda context: Newest(), summary="the latest arrival yields")
