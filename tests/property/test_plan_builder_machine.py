"""The plan builder under a scheduler that asks for anything: what is legal is granted, what is not is refused and
changes nothing.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from hotswap.core.contracts.plan import StepPlan
from hotswap.core.contracts.policy import RequestView
from hotswap.core.contracts.scheduler import Scheduler
from hotswap.core.errors import PlanError
from hotswap.core.request import Request, Status, WaitingReason
from hotswap.core.scheduling.plan_builder import StepPlanBuilder
from hotswap.core.testing.scheduling_harness import SchedulingFault, SchedulingHarness, fake_request
from hotswap.core.testing.scheduling_machine import Machine
from hotswap.core.testing.scripted_executor import IllegalPlanError
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.victims.newest import Newest

BLOCK_SIZE = 4
BASES = [[0] * 40, [0, 0, 0, 0, 1] * 8]


class Handed(Scheduler):
    """Gives the plan that the machine has built."""

    plan: StepPlan | None = None

    def schedule(self) -> StepPlan | None:
        plan, self.plan = self.plan, None
        return plan


class PlanBuilderMachine(Machine):
    builder_class: type[StepPlanBuilder] = StepPlanBuilder

    @initialize(
        num_blocks=st.integers(3, 10),
        depth=st.integers(1, 3),
        budget=st.integers(1, 16),
        chunked=st.sampled_from([True, True, False]),
        max_num_seqs=st.integers(1, 4),
    )
    def start(self, num_blocks: int, depth: int, budget: int, chunked: bool, max_num_seqs: int) -> None:
        self.policy = Fcfs()
        self.harness = SchedulingHarness(
            lambda mechanism: Handed(mechanism, self.policy, Newest()),
            self.policy,
            num_blocks=num_blocks,
            max_steps_in_flight=depth,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if chunked else 32 + budget,
            max_model_len=32,
            enable_chunked_prefill=chunked,
        )
        self.builder: StepPlanBuilder | None = None
        self.placed: set[int] = set()  # in the plan under construction
        self.tokens_left = 0
        self.next_id = 0

    @property
    def live(self) -> list[Request]:
        return [r for r in self.harness.requests.values() if r.status is not Status.FINISHED]

    def pick(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(list(self.harness.requests.values())))

    @rule(base=st.sampled_from(BASES), length=st.integers(1, 11), max_tokens=st.integers(0, 9))
    def add(self, base: list[int], length: int, max_tokens: int) -> None:
        self.harness.add(fake_request(self.next_id, base[:length], max_tokens=max_tokens))
        self.next_id += 1

    @precondition(
        lambda self: self.builder is None and self.harness.executor.num_in_flight < self.harness.max_steps_in_flight
    )
    @rule()
    def begin(self) -> None:
        self.builder = self.harness.mechanism.begin_plan()
        self.builder.__class__ = self.builder_class
        self.placed = set()
        self.tokens_left = self.harness.limits.max_num_batched_tokens
        with pytest.raises(PlanError, match="not built"):
            self.harness.mechanism.begin_plan()

    @precondition(lambda self: self.builder is not None and self.harness.requests)
    @rule(data=st.data())
    def schedule(self, data: st.DataObject) -> None:
        assert self.builder is not None
        request = self.pick(data)
        wanted = self.builder.num_tokens_wanted(request)
        self.try_to_schedule(
            request, data.draw(st.sampled_from([wanted, min(wanted, self.tokens_left)]) | st.integers(-1, 18))
        )

    def try_to_schedule(self, request: Request, num_tokens: int) -> None:
        builder = self.builder
        assert builder is not None
        wanted = builder.num_tokens_wanted(request)
        whole = self.harness.limits.chunked or num_tokens == wanted
        legal = (
            0 < num_tokens <= wanted and num_tokens <= self.tokens_left and whole and request.status is Status.RUNNING
        )
        legal = legal and request.request_id not in self.placed
        free = self.harness.kv.pool.num_free_blocks
        missing = -(-(request.num_scheduled_tokens + num_tokens) // BLOCK_SIZE) - request.num_blocks
        legal = legal and missing <= free
        if legal:
            assert builder.can_schedule(request, num_tokens)
            builder.schedule(request, num_tokens)
            self.granted(request, num_tokens)
            assert self.harness.kv.pool.num_free_blocks == free - max(0, missing)
        else:
            self.refused(lambda: builder.schedule(request, num_tokens))

    @precondition(lambda self: self.builder is not None and self.harness.requests)
    @rule(data=st.data(), num_tokens=st.integers(0, 18))
    def admit(self, data: st.DataObject, num_tokens: int) -> None:
        self.try_to_admit(self.pick(data), num_tokens)

    def try_to_admit(self, request: Request, num_tokens: int) -> None:
        builder = self.builder
        assert builder is not None
        if request.status is not Status.WAITING:
            self.refused(lambda: builder.admit(request, num_tokens))
            with pytest.raises(PlanError):
                builder.can_admit(request, num_tokens)
            return
        most = builder.num_tokens_to_admit(request)
        if builder.can_admit(request, num_tokens):
            assert 0 < num_tokens <= min(most, self.tokens_left)
            assert self.harness.mechanism.num_running < self.harness.limits.max_num_seqs
            self.policy.remove(request.request_id)
            builder.admit(request, num_tokens)
            self.granted(request, num_tokens)
        else:
            self.refused(lambda: builder.admit(request, num_tokens))

    @precondition(lambda self: self.builder is not None and self.harness.requests)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """The machine admits past those who could be held, too: that is legal."""
        builder, request = self.builder, self.pick(data)
        assert builder is not None
        if request.status is not Status.WAITING:
            with pytest.raises(PlanError):
                builder.can_hold(request)
            self.refused(lambda: builder.hold(request))
        elif builder.can_hold(request):
            seats = builder.budget.num_requests
            self.policy.remove(request.request_id)
            builder.hold(request)
            assert request.waiting_for is WaitingReason.PREFIX
            assert builder.budget.num_requests == seats - 1 >= 0
        else:
            self.refused(lambda: builder.hold(request))

    @precondition(lambda self: self.builder is not None and self.harness.requests)
    @rule(data=st.data(), for_needy=st.booleans())
    def preempt(self, data: st.DataObject, for_needy: bool) -> None:
        builder, request = self.builder, self.pick(data)
        assert builder is not None
        running = list(self.harness.mechanism.running)
        offered = list(builder.preemption_candidates(None))
        assert not running or running[0] not in offered or running[0].preempt_pending
        assert not {view.request_id for view in offered} & self.placed
        if for_needy and request.status is Status.RUNNING:
            behind = running[running.index(request) + 1 :]
            assert set(builder.preemption_candidates(request)) <= set(behind) & set(offered)
        if request in offered:
            in_flight = request.num_in_flight_steps > 0
            assert builder.preempt(request) == (not in_flight)
            assert request.status is (Status.RUNNING if in_flight else Status.WAITING)
            assert builder.num_tokens_wanted(request) == 0
        else:
            self.refused(lambda: builder.preempt(request))

    @precondition(lambda self: self.builder is not None)
    @rule()
    def build(self) -> None:
        builder = self.builder
        assert builder is not None
        scheduler = self.harness.scheduler
        assert isinstance(scheduler, Handed)
        plan = scheduler.plan = builder.build()
        assert {row.request_id for row in plan.scheduled} == self.placed if plan is not None else not self.placed
        with pytest.raises(PlanError, match="built already"):
            builder.build()
        self.builder = None
        self.harness.schedule()

    @precondition(lambda self: self.builder is not None)
    @rule()
    def fill(self) -> None:
        """Gives everybody what is left, as a scheduler would, and sends the plan off."""
        assert self.builder is not None
        for request in self.live:
            if request.status is Status.RUNNING and (wanted := self.builder.num_tokens_wanted(request)):
                self.try_to_schedule(request, min(wanted, self.tokens_left))
            elif request.status is Status.WAITING:
                self.try_to_admit(request, min(self.builder.num_tokens_to_admit(request), self.tokens_left))
        self.build()
        self.confirm()

    @precondition(lambda self: self.builder is None)
    @rule()
    def confirm(self) -> None:
        self.harness.confirm()

    @precondition(lambda self: self.builder is None and self.harness.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(self.pick(data).request_id)

    def granted(self, request: Request, num_tokens: int) -> None:
        builder = self.builder
        assert builder is not None
        self.placed.add(request.request_id)
        self.tokens_left -= num_tokens
        assert builder.budget.num_tokens == self.tokens_left >= 0
        assert builder.is_scheduled(request)
        assert builder.num_tokens_wanted(request) == 0
        self.harness.mechanism.kv.check_integrity(self.live)

    def refused(self, attempt) -> None:  # type: ignore[no-untyped-def]
        """A refusal leaves everything as it was."""

        def snapshot() -> object:
            pool = self.harness.kv.pool
            assert self.builder is not None
            requests = [(r.status, r.num_scheduled_tokens, r.num_placeholders, tuple(r.block_ids)) for r in self.live]
            return requests, list(pool.ref_counts), pool.num_free_blocks, self.builder.budget.num_tokens

        before = snapshot()
        with pytest.raises(PlanError):
            attempt()
        assert snapshot() == before

    def teardown(self) -> None:
        if self.has_failed or not hasattr(self, "harness"):
            return
        if self.builder is not None:
            self.build()
        self.harness.scheduler = ContinuousBatching(self.harness.mechanism, self.policy, Newest())
        self.harness.drain(max_turns=2000)
        for request_id, ended in self.harness.ended.items():
            if ended.finish_reason == "length":
                assert ended.token_ids == self.harness.expected_tokens(request_id)


CHECKED = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
TestPlanBuilder = PlanBuilderMachine.TestCase
TestPlanBuilder.settings = CHECKED


class Generous(StepPlanBuilder):
    """Forgets to take what it grants off the budget."""

    def _place(self, request: Request, before: int, num_tokens: int, reaches_end: bool, new_block_ids: object) -> None:
        left = self.budget.num_tokens
        super()._place(request, before, num_tokens, reaches_end, new_block_ids)  # type: ignore[arg-type]
        self.budget.num_tokens = left


class Careless(StepPlanBuilder):
    """Lets the protected request be preempted."""

    def _may_yield(self, request: Request) -> bool:
        return True

    def preemption_candidates(self, needy: RequestView | None) -> list[Request]:
        return list(self._state.running.requests)


class Unseated(StepPlanBuilder):
    """Admits more requests than there are seats."""

    def _reason_against(self, request: Request, num_tokens: int) -> str | None:
        self.budget.num_requests = 1
        return super()._reason_against(request, num_tokens)


class Untold(StepPlanBuilder):
    """Does not tell the runner about new blocks."""

    def build(self) -> StepPlan | None:
        plan = super().build()
        for row in plan.scheduled if plan is not None else ():
            row.new_block_ids = None
        return plan


class Unremoved(StepPlanBuilder):
    """Does not tell the runner who left."""

    def build(self) -> StepPlan | None:
        plan = super().build()
        if plan is not None:
            plan.removed.clear()
        return plan


@pytest.mark.parametrize("broken", [Generous, Careless, Unseated, Untold, Unremoved])
def test_machine_rejects_broken_builder(broken: type[StepPlanBuilder]) -> None:
    machine = type("Machine", (PlanBuilderMachine,), {"builder_class": broken})
    quick = settings(CHECKED, phases=[Phase.generate], report_multiple_bugs=False, database=None)
    with pytest.raises((AssertionError, SchedulingFault, IllegalPlanError, PlanError)):
        run_state_machine_as_test(machine, settings=quick)
