"""One simulated engine: EngineCore itself, over a simulated executor and a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ..clock import ManualClock
from ..contracts.observer import FinishedRequest, Observer
from ..contracts.policy import Policy
from ..contracts.scheduler import Scheduler
from ..engine.engine_core import EngineCore
from ..engine.observers import ObserverSet
from ..engine.wire import EngineRequest
from ..kv_cache.manager import KVCacheManager
from ..sampling_params import SamplingParams
from ..scheduling.limits import SchedulingLimits
from ..scheduling.mechanism import Mechanism
from .executor import END_TOKEN, SimulatedExecutor
from .requests import OWN_TOKENS, VOCABULARY, Run, SimulatedRequest, prompt_runs, tokens_of
from .step_cost import StepCost

IDLE_SECONDS: Final = 0.001  # what the engine's loop sleeps when a turn brought nothing (core/engine/process.py)
_PREFIX_SEED: Final = b"hotswap simulate"


@dataclass(frozen=True, slots=True)
class EngineSize:
    """limits: of steps and queue. num_blocks, block_size: the KV cache. max_steps_in_flight: 2 plans a step while one
    runs."""

    limits: SchedulingLimits
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True
    max_steps_in_flight: int = 2


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """What a replica did. num_tokens: computed. busy_seconds: that steps took. prefix_queries, prefix_hits: tokens."""

    num_steps: int
    num_tokens: int
    busy_seconds: float
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int


class Replica:
    """Requests in by `submit`, out by `on_end`; every `turn` is one of the engine's loop.

    clock: the replica's own; the policy was built with it. make_scheduler: builds the scheduler over the mechanism, as
    the plugin manager does. on_end: told of every request that ends, shed ones included. max_tokens: what every request
    asks for at most; it then ends by a token. None: each asks for the tokens that it will get, so that a policy can
    know them.
    """

    def __init__(
        self,
        size: EngineSize,
        cost: StepCost,
        clock: ManualClock,
        policy: Policy,
        make_scheduler: Callable[[Mechanism], Scheduler],
        on_end: Callable[[FinishedRequest], None],
        *,
        observers: Sequence[tuple[str, Observer]] = (),
        max_tokens: int | None = None,
    ) -> None:
        self.clock = clock
        self._max_tokens = max_tokens
        self._executor = SimulatedExecutor(clock, cost)
        self._on_end = on_end
        kv = KVCacheManager(
            size.num_blocks,
            size.block_size,
            enable_prefix_caching=size.enable_prefix_caching,
            prefix_seed=_PREFIX_SEED,
        )
        mechanism = Mechanism(size.limits, kv, policy, clock)
        self._core = EngineCore(
            mechanism,
            make_scheduler(mechanism),
            self._executor,
            clock,
            max_steps_in_flight=size.max_steps_in_flight,
            logits_width=VOCABULARY,
            observers=ObserverSet([*observers, ("the simulator", _Ends(self._ended))]),
        )

    @property
    def has_work(self) -> bool:
        return self._core.has_work()

    def submit(self, number: int, request: SimulatedRequest, arrival: float, history: Sequence[Run] = ()) -> str | None:
        """Queues a request, at the clock's time. number: its id. arrival: when it came, not after now. history: what
        its conversation said before. The reason when the engine refuses it."""
        own = OWN_TOKENS + number
        prompt = tokens_of(prompt_of(request, number, history))
        limit = request.output_tokens if self._max_tokens is None else self._max_tokens
        sampling = SamplingParams(
            max_tokens=limit, temperature=0.0, eos_token_ids=[] if self._max_tokens is None else [END_TOKEN]
        )
        self._executor.expect(number, own, len(prompt), request.output_tokens)
        refusal = self._core.add_request(
            EngineRequest(number, prompt, sampling, arrival, priority=request.priority, user=request.user)
        )
        if refusal is None:
            return None
        self._executor.forget(number)
        return refusal.error_code or refusal.error or "refused"

    def turn(self) -> None:
        """Fills the pipeline and waits for its oldest step. Time moves to the step's end; a little when there was none."""
        before = self.clock.now()
        updates = self._core.step()
        if not updates and self.clock.now() == before:
            self.clock.advance_to(before + IDLE_SECONDS)

    def totals(self) -> EngineTotals:
        stats, executor = self._core.stats(), self._executor
        return EngineTotals(
            num_steps=executor.num_steps,
            num_tokens=executor.num_tokens,
            busy_seconds=executor.busy_seconds,
            num_preemptions=stats.num_preemptions_recompute,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
        )

    def close(self) -> None:
        """Ends the observers. When everything has ended, blocks and counts are audited. Raises PoolIntegrityError."""
        self._core.close_observers()
        if not self.has_work:
            self._core.mechanism.check_integrity()

    def _ended(self, request: FinishedRequest) -> None:
        self._executor.forget(request.request_id)
        self._on_end(request)


def prompt_of(request: SimulatedRequest, number: int, history: Sequence[Run]) -> list[Run]:
    """The prompt's runs. A turn of a conversation says at least one token that is new."""
    begin = history or request.shared
    return prompt_runs(begin, request.prompt_tokens, OWN_TOKENS + number, least_own=1 if history else 0)


class _Ends(Observer):
    def __init__(self, tell: Callable[[FinishedRequest], None]) -> None:
        self._tell = tell

    def on_finish(self, request: FinishedRequest) -> None:
        self._tell(request)
