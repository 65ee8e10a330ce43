"""Victim rule `my_victim`: whoever loses the least work yields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotswap.core.contracts import Provider, RequestView, VictimRule, hookimpl


class MyVictim(VictimRule):
    """The fewest computed tokens, as those are computed again; between equals, the latest arrival."""

    def choose(self, candidates: Sequence[RequestView], num_blocks_needed: int) -> RequestView:
        return min(candidates, key=lambda view: (view.num_computed_tokens, -view.arrival_time, -view.request_id))


@hookimpl
def hotswap_victim() -> Iterator[Provider[VictimRule]]:
    yield Provider(name="my_victim", build=lambda context: MyVictim(), summary="whoever has the least computed yields")
