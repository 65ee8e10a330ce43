"""Policy `longest_prefix`: whoever finds most of its prompt in the prefix cache goes first, before that is evicted.

Longest prefix match first is the cache-aware order of Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs" (RadixAttention), arXiv 2312.07104: requests that share a prefix are served one after the other, as a depth-first
walk of the prefix tree would have it. The paper names starvation as its price; here `max_wait_seconds` ends it.

What differs from the paper: it looks every waiting request up in each step. Here the core is asked about a few a step, in turn
out of the first `window` of the queue, and about the one that would go next; for the others the number is as of their arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.policy import PolicyContext, PolicyProvider, RequestView

from .queued import PatientPolicy


class LongestPrefixOptions(BaseModel):
    """What may follow `--plugin policy=longest_prefix,`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_wait_seconds: float = Field(
        default=10.0,
        gt=0,
        allow_inf_nan=False,
        description="Whoever has waited so long is served next, by arrival, whatever is in the cache.",
    )
    window: int = Field(
        default=128, ge=1, le=4096, description="For how many at the front of the queue the cache is looked up again."
    )
    lookups_per_step: int = Field(
        default=8, ge=0, le=31, description="How many of the window are looked up in a step, in turn."
    )


class LongestPrefix(PatientPolicy[tuple[int, int, float]]):
    """By cached tokens, most first, then by arrival. Whoever was preempted goes before them, by arrival: it was served
    already, and its blocks, the longest prefix there is, are the next to be evicted.
    """

    def __init__(self, options: LongestPrefixOptions, clock: Callable[[], float]) -> None:
        super().__init__(clock, options.max_wait_seconds)
        self._window = options.window
        self._lookups_per_step = options.lookups_per_step
        self._next_lookup = 0  # a place in the window
        self._looked_up: list[RequestView] = []

    def key(self, view: RequestView) -> tuple[int, int, float]:
        if view.num_preemptions:
            return 0, 0, view.arrival_time
        return 1, -view.num_cached_prompt_tokens, view.arrival_time

    def hints_wanted(self) -> Iterable[RequestView]:
        size = min(self._window, len(self._queue))
        start = self._next_lookup if self._next_lookup < size else 0
        self._next_lookup = min(start + self._lookups_per_step, size)
        self._looked_up = self._queue.slice(start, self._next_lookup)
        first = self._queue.first()
        if first is not None:
            self._looked_up.append(first)  # last: the core has its match at hand when it is admitted
        return self._looked_up

    def reorder(self) -> None:
        for view in self._looked_up:
            if view.request_id in self._queue:
                self._queue.put(view, self.key(view))
        self._looked_up = []


@hookimpl
def hotswap_policy() -> Iterator[PolicyProvider]:
    def build(context: PolicyContext) -> LongestPrefix:
        options = context.options if isinstance(context.options, LongestPrefixOptions) else LongestPrefixOptions()
        return LongestPrefix(options, context.clock.now)

    yield PolicyProvider(
        name="longest_prefix",
        build=build,
        options=LongestPrefixOptions,
        summary="the longest cached prefix first; nobody waits longer than max_wait_seconds for it",
    )
