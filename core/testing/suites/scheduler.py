"""Conformance of kind `scheduler`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from ...contracts.policy import Budget, Policy, RequestView
from ...contracts.scheduler import Scheduler
from ...contracts.victim import VictimRule
from ...kv_cache.manager import KVCacheManager
from ...scheduling.limits import SchedulingLimits
from ...scheduling.mechanism import Mechanism
from ..limits import no_real_time
from ..plain import ByArrival
from ..scheduling_harness import PREFIX_SEED, SchedulingHarness, fake_request
from ..scheduling_machine import SchedulingMachine
from ..templates.policy import MyPolicy, MyPolicyOptions
from ..templates.victim import MyVictim
from .base import ConformanceSuite


class SmallShares(ByArrival):
    """Grants each request a few tokens a step."""

    tokens = 3

    def share(self, view: RequestView, budget: Budget) -> int:
        return self.tokens


class LongestFirst(ByArrival):
    """An order that no scheduler would come upon by itself."""

    def key(self, view: RequestView) -> float:
        return -view.num_prompt_tokens


class RecordingVictim(MyVictim):
    """Remembers whom it named."""

    def __init__(self) -> None:
        self.named: list[int] = []

    def choose(self, candidates: Sequence[RequestView], num_blocks_needed: int) -> RequestView:
        view = super().choose(candidates, num_blocks_needed)
        self.named.append(view.request_id)
        return view


class SchedulerSuite(ConformanceSuite):
    """max_steps_to_end: how many turns of the engine a small request may take while others keep arriving.

    holds_prefixes: False for a scheduler that means to let requests compute what others are computing.
    """

    kind = "scheduler"
    max_steps_to_end: ClassVar[int] = 300
    holds_prefixes: ClassVar[bool] = True

    def context_fields(self) -> dict[str, Any]:
        policy = ByArrival()
        limits = SchedulingLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=48, min_tokens_awaited=1)
        kv = KVCacheManager(16, 4, prefix_seed=PREFIX_SEED)
        return {"mechanism": Mechanism(limits, kv, policy), "policy": policy, "victim": MyVictim()}

    def make(self, mechanism: Mechanism, policy: Policy, victim: VictimRule) -> Scheduler:
        scheduler: Scheduler = self.build(mechanism=mechanism, policy=policy, victim=victim)
        return scheduler

    def harness(self, policy: Policy | None = None, victim: VictimRule | None = None, **limits: Any) -> Any:
        """An engine without a model around the scheduler. Limits are SchedulingHarness's."""
        order = ByArrival() if policy is None else policy
        rule = MyVictim() if victim is None else victim
        return SchedulingHarness(lambda mechanism: self.make(mechanism, order, rule), order, **limits)

    def test_gives_none_when_nothing_waits(self) -> None:
        """`schedule` returns None, every time, while there is nothing to do."""
        harness = self.harness()
        assert [harness.schedule() for _ in range(3)] == [None, None, None]

    def test_returns_the_plan_that_it_built(self) -> None:
        """Each call begins one plan, builds it and returns what `build` gave."""
        harness = self.harness()
        for number in range(3):
            harness.add(fake_request(number, range(6), max_tokens=12))
        for _ in range(100):
            before = harness.mechanism.num_steps_in_flight
            plan = harness.schedule()
            built = harness.mechanism.num_steps_in_flight - before
            assert built == (plan is not None), "a plan was built and not returned, or returned and not built"
            if plan is None:
                harness.confirm()
        assert not harness.mechanism.num_unfinished, "three small requests have not ended after 100 calls"

    def test_serves_one_request(self) -> None:
        """A lone request gets its tokens, with a prompt longer than a step."""
        harness = self.harness(max_num_batched_tokens=5)
        harness.add(fake_request(0, range(20), max_tokens=6))
        harness.drain(max_turns=200)
        assert harness.ended[0].token_ids == harness.expected_tokens(0)

    def test_serves_in_the_policys_order(self) -> None:
        """With one seat and blocks for all, requests are admitted as the policy shows them, whatever time it is: that is
        `context.clock`'s.
        """
        harness = self.harness(LongestFirst(), max_num_seqs=1, num_blocks=64)
        for number, length in enumerate((3, 9, 5, 12, 7)):
            harness.add(fake_request(number, [number] * length, max_tokens=2))
        with no_real_time():
            harness.drain(max_turns=500)
        admitted = [new.request_id for plan in harness.plans for new in plan.new]
        assert admitted == [3, 1, 4, 2, 0]

    def test_respects_the_policys_share(self) -> None:
        """No request gets more tokens in a step than `share` grants it."""
        harness = self.harness(SmallShares(), num_blocks=64)
        for number in range(4):
            harness.add(fake_request(number, [number] * 11, max_tokens=3))
        harness.drain(max_turns=500)
        most = max(row.num_tokens for plan in harness.plans for row in plan.scheduled)
        assert most <= SmallShares.tokens, f"a row of {most} tokens where the policy grants {SmallShares.tokens}"

    def test_refuses_whom_the_policy_sheds(self) -> None:
        """Whoever `shed` names is taken out of the policy and refused, with the policy's reason and status."""
        policy = ByArrival()
        harness = self.harness(policy, max_num_seqs=1)
        for number in range(4):
            harness.add(fake_request(number, [number] * 4, max_tokens=3))
        harness.step()
        policy.to_shed = [2, 3]
        harness.drain(max_turns=200)
        for request_id in (2, 3):
            ended = harness.ended[request_id]
            assert (ended.finish_reason, ended.error_status) == ("error", 429), f"request {request_id} was not refused"
            assert ended.error == "asked for by the test"
        assert harness.ended[1].finish_reason == "length"

    def test_preempts_whom_the_victim_rule_names(self) -> None:
        """When blocks run out the victim rule is asked, and nobody else is preempted."""
        victim = RecordingVictim()
        harness = self.harness(victim=victim, num_blocks=8, enable_prefix_caching=False)
        for number in range(4):
            harness.add(fake_request(number, [number] * 4, max_tokens=16))
        harness.drain(max_turns=2000)
        preempted = {number for number, request in harness.requests.items() if request.num_preemptions}
        assert preempted <= set(victim.named), f"{preempted} were preempted, the rule named {set(victim.named)}"
        for number in range(4):
            assert harness.ended[number].token_ids == harness.expected_tokens(number)

    def test_uses_the_policy_that_was_swapped_in(self) -> None:
        """The engine sets `policy` anew between two steps: from then on the new one is asked."""
        old, new = ByArrival(), LongestFirst()
        harness = self.harness(old, max_num_seqs=1, num_blocks=64)
        for number, length in enumerate((3, 5, 9)):
            harness.add(fake_request(number, [number] * length, max_tokens=2))
        harness.step()
        harness.mechanism.policy = new
        harness.scheduler.policy = new
        harness.drain(max_turns=300)
        admitted = [request.request_id for plan in harness.plans for request in plan.new]
        assert admitted == [0, 2, 1]

    def test_nobody_waits_for_ever(self) -> None:
        """A request ends although newer ones arrive in every turn and blocks are short."""
        harness = self.harness(num_blocks=12, max_model_len=32)
        numbers = itertools.count()
        for _ in range(8):
            number = next(numbers)
            harness.add(fake_request(number, [number] * 3, max_tokens=3))
        long = next(numbers)
        harness.add(fake_request(long, [9] * 20, max_tokens=4))
        for _ in range(self.max_steps_to_end):
            while harness.mechanism.num_waiting < 8:
                number = next(numbers)
                harness.add(fake_request(number, [number] * 3, max_tokens=3))
            harness.step()
            if long in harness.ended:
                assert harness.ended[long].token_ids == harness.expected_tokens(long)
                return
        pytest.fail(f"a long request has not ended after {self.max_steps_to_end} turns: shorter ones pass it")

    def test_computes_shared_prefixes_once(self) -> None:
        """Of requests that arrive together behind one prefix the first computes it; the others are held until then."""
        if not self.holds_prefixes:
            pytest.skip("this scheduler does not hold requests back")
        harness = self.harness(num_blocks=64, max_num_seqs=6)
        for number in range(5):
            harness.add(fake_request(number, [*range(100, 124), number], max_tokens=1))
        harness.drain()
        assert harness.executor.num_tokens_computed == 24 + 5, "a prefix of 24 tokens and 5 tokens of their own"
        for number in range(5):
            assert harness.ended[number].token_ids == harness.expected_tokens(number)

    def test_serves_through_the_mechanism(self) -> None:
        """Whatever arrives, is aborted, fails or is swapped, with 1 to 3 steps in flight, with prompts split or whole:
        no block leaks or is shared by accident, budgets are kept, and every request ends with exactly its own tokens.
        """
        pieces = {
            "schedulers": (self.make,),
            "policies": (ByArrival, LongestFirst, lambda: MyPolicy(MyPolicyOptions())),
            "victims": (MyVictim,),
            "holds_prefixes": self.holds_prefixes,
        }
        machine = type("SchedulerUnderTheMechanism", (SchedulingMachine,), pieces)
        self.run_machine(machine, max_examples=30, steps=25)
