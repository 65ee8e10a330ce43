"""The plainest pieces of scheduling, for what surrounds the piece under test."""

from __future__ import annotations

from collections.abc import Iterable

from ..contracts.policy import KeyedPolicy, RequestView, Shed


class ByArrival(KeyedPolicy):
    """First come, first served; gives up on those in `to_shed` at the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.to_shed: list[int] = []

    def key(self, view: RequestView) -> float:
        return view.arrival_time

    def shed(self) -> Iterable[Shed]:
        ids, self.to_shed = self.to_shed, []
        return [Shed(request_id, "asked for by the test", 429) for request_id in ids]
