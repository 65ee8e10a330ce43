"""Policy `fcfs`: first come, first served. A preempted request keeps its arrival time, and with it its place."""

from __future__ import annotations

from collections.abc import Iterator

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.policy import KeyedPolicy, PolicyProvider, RequestView


class Fcfs(KeyedPolicy):
    """By arrival."""

    def key(self, view: RequestView) -> float:
        return view.arrival_time


@hookimpl
def hotswap_policy() -> Iterator[PolicyProvider]:
    yield PolicyProvider(name="fcfs", build=lambda context: Fcfs(), summary="first come, first served")
