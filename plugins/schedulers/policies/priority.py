"""Policy `priority`: the best class first (a lower value is served earlier), then by arrival."""

from __future__ import annotations

from collections.abc import Iterator

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.policy import KeyedPolicy, PolicyProvider, RequestView


class Priority(KeyedPolicy):
    """By class, then arrival. A class that never pauses starves those below it: that is what was asked for."""

    uses_priority = True

    def key(self, view: RequestView) -> tuple[int, float]:
        return view.priority, view.arrival_time


@hookimpl
def hotswap_policy() -> Iterator[PolicyProvider]:
    yield PolicyProvider(
        name="priority",
        build=lambda context: Priority(),
        default_victim="lowest_priority",
        summary="best class first, then first come, first served",
    )
