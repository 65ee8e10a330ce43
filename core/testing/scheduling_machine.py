"""The scheduling mechanism under a scheduler, a policy and a victim rule, as a hypothesis state machine: with 1 to 3
steps in flight no block leaks or is shared by accident, budgets are kept, a shared prefix is computed once, whoever is
held back waits for somebody who delivers, and every request ends with exactly its own tokens. The scripted executor
checks each plan as a device would feel it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ..contracts.policy import Policy
from ..contracts.scheduler import Scheduler
from ..contracts.victim import VictimRule
from ..errors import RequestError
from ..kv_cache import KVCacheManager
from ..request import Request
from ..scheduling.mechanism import Mechanism
from .policy_driver import SHED_STATUSES
from .scheduling_harness import EndedRequest, SchedulingHarness, fake_request
from .scripted_executor import prompt_logprob

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
BASES = [[0] * 40, [0, 0, 0, 0, 1] * 8, [1, 0] * 20]  # few, so that prefixes meet

MakeScheduler = Callable[[Mechanism, Policy, VictimRule], Scheduler]


def script(request_id: int, index: int) -> int:
    """Few different tokens, so that outputs can be prefixes of one another and stop tokens come up."""
    return (request_id % 3 + index * index) % 7


def serve_under_pressure(make_scheduler: MakeScheduler, policy: Policy, victim: VictimRule) -> None:
    """Four requests in blocks for not quite two: some must yield, more than once, and each ends with its own tokens.
    Raises SchedulingFault, AssertionError, and whatever the pieces raise.
    """
    harness = SchedulingHarness(
        lambda mechanism: make_scheduler(mechanism, policy, victim), policy, num_blocks=8, enable_prefix_caching=False
    )
    for number in range(4):
        harness.add(fake_request(number, [number] * 4, max_tokens=16))
    harness.drain(max_turns=2000)
    for number, ended in harness.ended.items():
        if ended.finish_reason != "error":  # a policy may refuse
            assert ended.token_ids == harness.expected_tokens(number), f"request {number} has other tokens than its own"


class Machine(RuleBasedStateMachine):
    """A state machine whose `teardown`, which runs in any case, can tell whether a rule has raised: what it would find out
    after that would only hide the cause.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outside = sys.exc_info()[1]

    @property
    def has_failed(self) -> bool:
        """To be asked in `teardown`."""
        return sys.exc_info()[1] is not self._outside


class SchedulingMachine(Machine):
    """Subclass it with what is under test; whatever is not takes part in its plainest form.

    schedulers, policies, victims: factories; one of each is drawn for a run, and a policy again at each swap.
    make_kv: a cache of so many blocks; None for the core's own.
    holds_prefixes: whether the schedulers hold back whoever shares blocks in flight, so that each is computed once.
    """

    schedulers: ClassVar[tuple[MakeScheduler, ...]]
    policies: ClassVar[tuple[Callable[[], Policy], ...]]
    victims: ClassVar[tuple[Callable[[], VictimRule], ...]]
    make_kv: Callable[[int], KVCacheManager | None] = staticmethod(lambda num_blocks: None)
    with_aborts = True
    holds_prefixes: ClassVar[bool] = True

    @initialize(
        num_blocks=st.integers(3, 12),
        depth=st.integers(1, 3),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 20),
        chunked=st.sampled_from([True, True, True, False]),
        caching=st.sampled_from([True, True, False]),
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
        data: st.DataObject,
    ) -> None:
        # Indices, for functions are printed at length.
        make_scheduler = self.schedulers[data.draw(st.integers(0, len(self.schedulers) - 1))]
        victim = self.victims[data.draw(st.integers(0, len(self.victims) - 1))]()
        policy = self.policies[data.draw(st.integers(0, len(self.policies) - 1))]()
        window = min(MAX_MODEL_LEN, num_blocks * BLOCK_SIZE)
        self.failing: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.harness = SchedulingHarness(
            lambda mechanism: make_scheduler(mechanism, policy, victim),
            policy,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_steps_in_flight=depth,
            script=script,
            errors=lambda request_id, index: "scripted fault" if self.failing.get(request_id) == index else None,
            enable_prefix_caching=caching,
            computes_once=self.holds_prefixes,
            kv=self.make_kv(num_blocks),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if chunked else window + budget,
            max_model_len=MAX_MODEL_LEN,
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
        adapter=st.sampled_from(["", "", "", "digest"]),
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
        adapter: str,
        priority: int,
        fails_at: int | None,
    ) -> None:
        request = fake_request(
            self.next_id,
            prompt,
            cache_salt=salt,
            adapter_key=adapter,
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

    @rule(
        base=st.sampled_from(BASES),
        lengths=st.lists(st.integers(BLOCK_SIZE, 20), min_size=2, max_size=3),
        max_tokens=st.integers(0, 6),
        fate=st.sampled_from(["fails", "is aborted", "lives"]),
    )
    def fan_out(self, base: list[int], lengths: list[int], max_tokens: int, fate: str) -> None:
        """Some that share a prefix arrive together, and something may happen to the first while it computes that."""
        first = self.next_id
        for length in lengths:
            if length < self.harness.mechanism.window:
                self.harness.add(fake_request(self.next_id, base[:length], max_tokens=max_tokens))
                self.next_id += 1
        if self.next_id > first and fate == "fails":
            self.failing[first] = 0
        self.harness.schedule()
        if self.with_aborts and fate == "is aborted" and first in self.harness.confirmed:
            self._abort(first)

    @precondition(lambda self: self.with_aborts and self.next_id)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Any id: waiting, running, in flight, ended, refused, never seen."""
        self._abort(data.draw(st.integers(0, self.next_id)))

    def _abort(self, request_id: int) -> None:
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

    @rule(data=st.data())
    def swap_policy(self, data: st.DataObject) -> None:
        fresh = self.policies[data.draw(st.integers(0, len(self.policies) - 1))]()
        self.harness.mechanism.policy = fresh
        self.harness.scheduler.policy = fresh

    def teardown(self) -> None:
        if self.has_failed or not hasattr(self, "harness"):
            return
        harness = self.harness
        harness.drain(max_turns=3000)
        for request_id, ended in harness.ended.items():
            self.check_ended(harness.requests[request_id], ended)
            if ended.prompt_logprobs is not None or ended.finish_reason in ("stop", "length"):
                self.check_prompt_logprobs(harness.requests[request_id])
        assert harness.kv.waste(harness.mechanism.running) == 0.0
        assert harness.mechanism.num_waiting == 0
        # Whatever the runner still holds has been taken from it in the books, and goes with the next plan.
        assert len(harness.executor.held) == harness.mechanism.num_pending_removals

    def check_ended(self, request: Request, ended: EndedRequest) -> None:
        tokens, reason = ended.token_ids, ended.finish_reason
        expected = self.harness.expected_tokens(request.request_id)
        fails_at = self.failing.get(request.request_id, len(expected))
        if reason == "abort":
            assert request.request_id in self.aborted
            assert tokens == expected[: len(tokens)]
        elif reason == "error" and ended.error_status in SHED_STATUSES:  # by the policy
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
            assert ended.stop_reason == (tokens[-1] if stopped and tokens[-1] not in eos else None)

    def check_prompt_logprobs(self, request: Request) -> None:
        got = self.harness.ended[request.request_id].prompt_logprobs
        if request.sampling.prompt_logprobs is None:
            assert got is None
        else:
            prompt = request.prompt_token_ids
            assert got == [prompt_logprob(prompt, position) for position in range(1, len(prompt))]
