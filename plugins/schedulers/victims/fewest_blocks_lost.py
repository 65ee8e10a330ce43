"""Victim rule `fewest_blocks_lost`: whoever loses the least computed work yields.

Preemption by recomputation throws away what was computed for the victim alone; choosing victims by what it costs to restore
them is the rule of Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
arXiv 2309.06180, section 4.5, taken further: there the latest arrival yields, whatever it has computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.policy import RequestView
from hotswap.core.contracts.provider import Provider
from hotswap.core.contracts.victim import VictimContext, VictimRule


class FewestBlocksLost(VictimRule):
    """The fewest computed tokens that no prefix hit gave, among those that free enough blocks when some do; between equals the
    latest arrival. O(candidates).

    What a prefix hit gave is shared, or was in the index before: it is taken to be found there again, and not to come free.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def choose(self, candidates: Sequence[RequestView], num_blocks_needed: int) -> RequestView:
        enough = [view for view in candidates if self.num_own_blocks(view) >= num_blocks_needed]
        return min(
            enough or candidates, key=lambda view: (self.num_lost_tokens(view), -view.arrival_time, -view.request_id)
        )

    def num_lost_tokens(self, view: RequestView) -> int:
        """Computed tokens, those in flight among them, that are computed again after a preemption."""
        return max(0, view.num_scheduled_tokens - view.num_cached_prompt_tokens)

    def num_own_blocks(self, view: RequestView) -> int:
        """Blocks that come free for certain."""
        return view.num_blocks - view.num_cached_prompt_tokens // self._block_size


@hookimpl
def hotswap_victim() -> Iterator[Provider[VictimRule]]:
    def build(context: VictimContext) -> FewestBlocksLost:
        return FewestBlocksLost(context.config.cache.block_size)

    yield Provider(name="fewest_blocks_lost", build=build, summary="whoever loses the least computed work yields")
