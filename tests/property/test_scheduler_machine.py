"""The scheduling mechanism under a scheduler, with 1 to 3 steps in flight: no leak, no accidental sharing, budget kept,
every request ends with exactly its own tokens. The scripted executor checks each plan as a device would feel it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hotswap.core.contracts.plan import StepPlan
from hotswap.core.contracts.policy import KeyedPolicy, Policy, RequestView
from hotswap.core.contracts.scheduler import Scheduler
from hotswap.core.errors import PlanError, RequestError
from hotswap.core.kv_cache import BlockPool, KVCacheManager, PoolIntegrityError, PrefixIndex
from hotswap.core.request import Request
from hotswap.core.scheduling.mechanism import Mechanism
from hotswap.core.testing.scheduling_harness import SchedulingFault, SchedulingHarness, fake_request
from hotswap.core.testing.scripted_executor import IllegalPlanError, prompt_logprob
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.policies.priority import Priority
from hotswap.plugins.schedulers.victims.lowest_priority import LowestPriority
from hotswap.plugins.schedulers.victims.newest import Newest

BLOCK_SIZE = 4
BASES = [[0] * 40, [0, 0, 0, 0, 1] * 8, [1, 0] * 20]  # few, so that prefixes meet
MAKE_POLICY: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs, "priority": Priority}


def script(request_id: int, index: int) -> int:
    """Few different tokens, so that outputs can be prefixes of one another and stop tokens come up."""
    return (request_id % 3 + index * index) % 7


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


class SchedulerMachine(RuleBasedStateMachine):
    scheduler_classes: tuple[type[ContinuousBatching], ...] = (ContinuousBatching, ContinuousBatching, Rotating)
    make_kv: Callable[[int], KVCacheManager | None] = staticmethod(lambda num_blocks: None)
    with_aborts = True

    @initialize(
        num_blocks=st.integers(3, 12),
        depth=st.integers(1, 3),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 20),
        chunked=st.sampled_from([True, True, True, False]),
        caching=st.sampled_from([True, True, False]),
        policy=st.sampled_from(sorted(MAKE_POLICY)),
        victim=st.sampled_from([Newest, LowestPriority]),
        data=st.data(),
    )
    def start(
        self,
        num_blocks: int,
        depth: int,
        max_num_seqs: int,
        budget: int,
        chunked: bool,
        caching: bool,
        policy: str,
        victim: type[Newest],
        data: st.DataObject,
    ) -> None:
        waiting_order = MAKE_POLICY[policy]()
        scheduler_class = data.draw(st.sampled_from(self.scheduler_classes))
        window = min(40, num_blocks * BLOCK_SIZE)
        self.failing: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.harness = SchedulingHarness(
            lambda mechanism: scheduler_class(mechanism, waiting_order, victim()),
            waiting_order,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_steps_in_flight=depth,
            script=script,
            errors=lambda request_id, index: "scripted fault" if self.failing.get(request_id) == index else None,
            enable_prefix_caching=caching,
            kv=self.make_kv(num_blocks),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if chunked else window + budget,
            max_model_len=40,
            enable_chunked_prefill=chunked,
        )
        self.next_id = 0

    @rule(
        prompt=st.builds(lambda base, n: base[:n], st.sampled_from(BASES), st.integers(1, 30)),
        max_tokens=st.none() | st.integers(0, 20),
        min_tokens=st.integers(0, 4),
        stops=st.sets(st.integers(0, 6), max_size=1),
        eos=st.sets(st.integers(0, 6), max_size=1),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        salt=st.sampled_from([None, None, None, "tenant"]),
        adapter=st.sampled_from([0, 0, 0, 1]),
        priority=st.integers(0, 2),
        fails_at=st.sampled_from([None, None, None, None, 0, 3]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int | None,
        min_tokens: int,
        stops: set[int],
        eos: set[int],
        ignore_eos: bool,
        prompt_logprobs: int | None,
        salt: str | None,
        adapter: int,
        priority: int,
        fails_at: int | None,
    ) -> None:
        request = fake_request(
            self.next_id,
            prompt,
            cache_salt=salt,
            adapter_id=adapter,
            priority=priority,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, 20 if max_tokens is None else max_tokens),
            stop_token_ids=sorted(stops),
            eos_token_ids=sorted(eos),
            ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs,
        )
        self.next_id += 1
        window = self.harness.mechanism.window
        if len(prompt) >= window:
            with pytest.raises(RequestError) as refusal:
                self.harness.add(request)
            assert refusal.value.code == "context_length_exceeded"
            return
        self.harness.add(request)
        if fails_at is not None:
            self.failing[request.request_id] = fails_at

    @precondition(lambda self: self.with_aborts and self.next_id)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Any id: waiting, running, in flight, ended, refused, never seen."""
        request_id = data.draw(st.integers(0, self.next_id))
        if request_id in self.harness.confirmed and request_id not in self.harness.ended:
            self.aborted.add(request_id)
        self.harness.abort(request_id)

    @rule()
    def schedule(self) -> None:
        self.harness.schedule()

    @rule()
    def confirm(self) -> None:
        self.harness.confirm()

    @rule(turns=st.integers(1, 6))
    def step(self, turns: int) -> None:
        for _ in range(turns):
            self.harness.step()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.mechanism.reset_prefix_cache()

    @rule(policy=st.sampled_from(sorted(MAKE_POLICY)))
    def swap_policy(self, policy: str) -> None:
        fresh = MAKE_POLICY[policy]()
        self.harness.mechanism.policy = fresh
        self.harness.scheduler.policy = fresh

    def teardown(self) -> None:
        if not hasattr(self, "harness") or self.harness.faulty:
            return
        harness = self.harness
        harness.drain(max_turns=3000)
        for request_id, ended in harness.ended.items():
            self.check_ended(harness.requests[request_id], ended.token_ids, ended.finish_reason, ended.stop_reason)
            if ended.prompt_logprobs is not None or ended.finish_reason in ("stop", "length"):
                self.check_prompt_logprobs(harness.requests[request_id])
        assert harness.kv.waste(harness.mechanism.running) == 0.0
        assert harness.mechanism.num_waiting == 0
        # Whatever the runner still holds has been taken from it in the books, and goes with the next plan.
        assert len(harness.executor.held) == harness.mechanism.num_pending_removals

    def check_ended(self, request: Request, tokens: list[int], reason: str | None, stop_reason: int | None) -> None:
        expected = self.harness.expected_tokens(request.request_id)
        fails_at = self.failing.get(request.request_id, len(expected))
        if reason == "abort":
            assert request.request_id in self.aborted
            assert tokens == expected[: len(tokens)]
        elif reason == "error":
            assert tokens == expected[:fails_at]
        else:
            assert tokens == expected
            assert len(expected) <= fails_at
            stops = request.sampling.stop_token_ids
            eos = [] if request.sampling.ignore_eos else request.sampling.eos_token_ids
            stopped = bool(tokens) and tokens[-1] in stops + eos and len(tokens) >= request.sampling.min_tokens
            assert reason == ("stop" if stopped else "length")
            assert stop_reason == (tokens[-1] if stopped and tokens[-1] not in eos else None)

    def check_prompt_logprobs(self, request: Request) -> None:
        got = self.harness.ended[request.request_id].prompt_logprobs
        if request.sampling.prompt_logprobs is None:
            assert got is None
        else:
            prompt = request.prompt_token_ids
            assert got == [prompt_logprob(prompt, position) for position in range(1, len(prompt))]


CHECKED = settings(max_examples=200, stateful_step_count=30, deadline=None, derandomize=True)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = CHECKED


def reject(message: str, **changes: object) -> None:
    """Runs the machine with something broken in it: one of the checks must speak up, saying `message`."""
    machine = type("Machine", (SchedulerMachine,), changes)
    quick = settings(CHECKED, phases=[Phase.generate], report_multiple_bugs=False, database=None)
    with pytest.raises((SchedulingFault, IllegalPlanError, PlanError, PoolIntegrityError), match=message):
        run_state_machine_as_test(machine, settings=quick)


def kv_with(pool_class: type[BlockPool] = BlockPool, index_class: type[PrefixIndex] = PrefixIndex) -> object:
    def make(num_blocks: int) -> KVCacheManager:
        kv = KVCacheManager(num_blocks, BLOCK_SIZE)
        kv.index = index_class(BLOCK_SIZE)
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

    def root_key(self, adapter_id: int, cache_salt: str | None) -> bytes:
        return super().root_key(adapter_id, None)


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


def test_rejects_leaky_pool() -> None:
    reject("has reference count 1, but 0 owners", make_kv=kv_with(pool_class=LeakyPool))


def test_rejects_early_reuse() -> None:
    reject("in flight touches it", make_kv=kv_with(pool_class=EagerPool))


def test_rejects_tenants_that_share() -> None:
    reject("does not hold the KV of position", make_kv=kv_with(index_class=Saltless))


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
        (Overspending, "are left of the step"),
        (Unallocated, "KV blocks asked for"),
        (Twice, "is in this plan already"),
        (Starving, "does not get on|have not ended"),
        (WrongVictim, "must not be preempted"),
    ],
)
def test_rejects_broken_scheduler(broken: type[Scheduler], message: str) -> None:
    reject(message, scheduler_classes=(broken,))


class Losing(KeyedPolicy):
    """Loses every fifth request that is pushed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_pushed = 0

    def key(self, view: RequestView) -> float:
        return view.arrival_time

    def push(self, view: RequestView) -> None:
        self.num_pushed += 1
        if self.num_pushed % 5:
            super().push(view)


class Doubling(Fcfs):
    """Keeps a request that it has given away."""

    def pop(self) -> RequestView:
        view = super().pop()
        if view.request_id % 4 == 3:
            self.push(view)
        return view


@pytest.mark.parametrize("broken", [Losing, Doubling])
def test_rejects_broken_policy(broken: type[Policy]) -> None:
    policy = broken()
    harness = SchedulingHarness(lambda mechanism: ContinuousBatching(mechanism, policy, Newest()), policy)
    with pytest.raises((PlanError, SchedulingFault, IllegalPlanError)):
        for i in range(8):
            harness.add(fake_request(i, [i] * 5, max_tokens=4))
            harness.step()
        harness.drain()
