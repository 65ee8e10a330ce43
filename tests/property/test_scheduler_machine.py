"""The scheduling mechanism under the built-in schedulers, policies and victim rules, and everything broken that the
machine must see. The machine itself is hotswap.core.testing.scheduling_machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hotswap.core.contracts.plan import StepPlan
from hotswap.core.contracts.policy import Budget, Policy, RequestView
from hotswap.core.contracts.scheduler import Scheduler
from hotswap.core.errors import PlanError
from hotswap.core.kv_cache import BlockPool, KVCacheManager, PendingBlocks, PoolIntegrityError, PrefixIndex
from hotswap.core.request import Request
from hotswap.core.scheduling.mechanism import Mechanism
from hotswap.core.testing.scheduling_harness import SchedulingFault
from hotswap.core.testing.scheduling_machine import BLOCK_SIZE, SchedulingMachine
from hotswap.core.testing.scripted_executor import IllegalPlanError
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.policies.priority import Priority
from hotswap.plugins.schedulers.victims.lowest_priority import LowestPriority
from hotswap.plugins.schedulers.victims.newest import Newest


class Rotating(ContinuousBatching):
    """Besides continuous batching: takes a request out now and then without need, and may take it back in the same
    plan.
    """

    turn = 0

    def schedule(self) -> StepPlan | None:
        self.turn += 1
        if self.turn % 5:
            return super().schedule()
        plan = self.mechanism.begin_plan()
        for view in list(plan.preemption_candidates(None))[-1:]:
            plan.preempt(view)
        for view in tuple(self.mechanism.running):
            num_tokens = self._share(plan, view, plan.num_tokens_wanted(view))
            if num_tokens > 0 and plan.can_schedule(view, num_tokens):
                plan.schedule(view, num_tokens)
        self._admit(plan)
        return plan.build()


class Sparing(Fcfs):
    """Longer prompts are computed a few tokens a step, though more are left of it: the machine's budget is 20 at most where
    prompts are split, and there alone.
    """

    def share(self, view: RequestView, budget: Budget) -> int:
        return 3 if view.num_prompt_tokens >= 16 and budget.num_tokens <= 20 else budget.num_tokens


class SchedulerMachine(SchedulingMachine):
    schedulers = (ContinuousBatching, ContinuousBatching, Rotating)
    policies = (Fcfs, Priority, Sparing)
    victims = (Newest, LowestPriority)


CHECKED = settings(max_examples=200, stateful_step_count=30, deadline=None, derandomize=True)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = CHECKED


def reject(message: str, **changes: object) -> None:
    """Runs the machine with something broken in it: one of the checks must speak up, saying `message`."""
    machine = type("Machine", (SchedulerMachine,), changes)
    quick = settings(CHECKED, phases=[Phase.generate], report_multiple_bugs=False, database=None)
    with pytest.raises((SchedulingFault, IllegalPlanError, PlanError, PoolIntegrityError), match=message):
        run_state_machine_as_test(machine, settings=quick)


def kv_with(
    pool_class: type[BlockPool] = BlockPool,
    index_class: type[PrefixIndex] = PrefixIndex,
    pending_class: type[PendingBlocks] = PendingBlocks,
) -> object:
    def make(num_blocks: int) -> KVCacheManager:
        kv = KVCacheManager(num_blocks, BLOCK_SIZE)
        kv.index = index_class(BLOCK_SIZE)
        kv.pending = pending_class()
        kv.pool = pool_class(num_blocks, BLOCK_SIZE, on_evict=kv.index.remove)
        return kv

    return staticmethod(make)


class LeakyPool(BlockPool):
    """Forgets a block of a longer table."""

    def free(self, blocks: list[int], after: int | None = None) -> None:  # type: ignore[override]
        super().free(blocks[:-1] if len(blocks) > 2 else blocks, after)


class EagerPool(BlockPool):
    """Hands a block out again while a step in flight touches it."""

    def free(self, blocks: list[int], after: int | None = None) -> None:  # type: ignore[override]
        super().free(blocks, None)


class Saltless(PrefixIndex):
    """Tenants share blocks."""

    def root_key(self, adapter_key: str, cache_salt: str | None) -> bytes:
        return super().root_key(adapter_key, None)


class UnconfirmedManager(KVCacheManager):
    """Indexes blocks when they are allocated, before anything is computed in them."""

    def open_table(self, request: Request, hits: list[int], num_tokens: int) -> None:
        super().open_table(request, hits, num_tokens)
        computed, request.num_computed_tokens = (
            request.num_computed_tokens,
            request.num_known_tokens // BLOCK_SIZE * BLOCK_SIZE,
        )
        request.num_computed_tokens = min(request.num_computed_tokens, len(request.block_ids) * BLOCK_SIZE)
        self.index_computed(request)
        request.num_computed_tokens = computed

    def announce(self, request: Request) -> None:
        pass


class Deaf(PendingBlocks):
    """Does not notice that a block has come."""

    def confirm(self, request: Request, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._remove(request, key)


class Unforgetting(PendingBlocks):
    """Waits for the dead."""

    def forget_producer(self, request: Request, keys: Sequence[bytes]) -> None:
        pass


class Mourning(PendingBlocks):
    """Knows that they are dead, and tells nobody."""

    def forget_producer(self, request: Request, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._remove(request, key)


class Losing(PendingBlocks):
    """Releases requests to nowhere."""

    def take_released(self) -> list[Request]:
        super().take_released()
        return []


class Impatient(PendingBlocks):
    """Lets everybody compute what others compute already."""

    def num_pending(self, keys: Sequence[bytes], start: int, stop: int) -> int:
        return 0


class Promising(KVCacheManager):
    """Counts blocks as being computed that no step holds yet."""

    def announce_scheduled(self) -> None:
        scheduled = [(request, request.num_scheduled_tokens) for request in self._unannounced.values()]
        for request, _ in scheduled:
            request.num_scheduled_tokens = request.num_known_tokens
        super().announce_scheduled()
        for request, count in scheduled:
            request.num_scheduled_tokens = count


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Deaf, "waits for a block that nobody computes"),
        (Unforgetting, "are said to compute a block"),
        (Mourning, "waits for a block that nobody computes"),
        (Losing, "wait for a block,"),
        (Impatient, "is admitted to compute tokens"),
    ],
)
def test_rejects_broken_waiting_for_blocks_in_flight(broken: type[PendingBlocks], message: str) -> None:
    reject(message, make_kv=kv_with(pending_class=broken))


def test_rejects_waiting_for_what_no_step_holds() -> None:
    make_kv = staticmethod(lambda num_blocks: Promising(num_blocks, BLOCK_SIZE))
    reject("is held back, and nobody computes what it waits for", make_kv=make_kv)


def test_rejects_leaky_pool() -> None:
    reject("has reference count 1, but 0 owners", make_kv=kv_with(pool_class=LeakyPool))


def test_rejects_early_reuse() -> None:
    reject("in flight touches it", make_kv=kv_with(pool_class=EagerPool))


def test_rejects_tenants_that_share() -> None:
    reject("does not hold the KV of position|nobody computes what it", make_kv=kv_with(index_class=Saltless))


def test_rejects_blocks_indexed_before_they_are_computed() -> None:
    make_kv = staticmethod(lambda num_blocks: UnconfirmedManager(num_blocks, BLOCK_SIZE))
    reject("does not hold the KV of position|writes into blocks", make_kv=make_kv)


class Overspending(ContinuousBatching):
    """Gives every running request what it wants."""

    def _share(self, plan, view, wanted):  # type: ignore[no-untyped-def]
        return wanted if view.num_blocks else super()._share(plan, view, wanted)

    def _make_room(self, plan, view, num_tokens):  # type: ignore[no-untyped-def]
        return plan.num_blocks_missing(view, num_tokens) == 0


class Unallocated(ContinuousBatching):
    """Schedules without asking whether there are blocks."""

    def _make_room(self, plan, view, num_tokens):  # type: ignore[no-untyped-def]
        return True


class Twice(ContinuousBatching):
    """Puts a request into a plan twice."""

    def _make_room(self, plan, view, num_tokens):  # type: ignore[no-untyped-def]
        if super()._make_room(plan, view, num_tokens):
            plan.schedule(view, num_tokens)
            return True
        return False


class Starving(ContinuousBatching):
    """Serves the last one first, and only that."""

    def _make_room(self, plan, view, num_tokens):  # type: ignore[no-untyped-def]
        last = self.mechanism.running[-1]
        return view is last and super()._make_room(plan, view, num_tokens)


class WrongVictim(ContinuousBatching):
    """Its victim rule names somebody who was not offered."""

    def __init__(self, mechanism: Mechanism, policy: Policy, victim: Newest) -> None:
        super().__init__(mechanism, policy, victim)
        running = mechanism.running

        class First(Newest):
            def choose(self, candidates, num_blocks_needed):  # type: ignore[no-untyped-def]
                return running[0]

        self.victim = First()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Overspending, "are left of the step|have not ended"),
        (Unallocated, "KV blocks asked for"),
        (Twice, "is in this plan already"),
        (Starving, "does not get on|have not ended"),
        (WrongVictim, "must not be preempted"),
    ],
)
def test_rejects_broken_scheduler(broken: type[Scheduler], message: str) -> None:
    reject(message, schedulers=(broken,))
