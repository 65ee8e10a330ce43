"""Progress is guaranteed, whatever a policy's share or a scheduler says; and a prompt's scores are computed once."""

from __future__ import annotations

import logging

import pytest

from hotswap.core.clock import ManualClock
from hotswap.core.contracts.plan import StepPlan
from hotswap.core.contracts.policy import Budget, Policy, RequestView
from hotswap.core.contracts.scheduler import RequestUpdate
from hotswap.core.engine.engine_core import PATIENCE_TURNS, EngineCore
from hotswap.core.engine.input_processor import InputLimits, InputProcessor
from hotswap.core.engine.wire import EngineInfo, EngineRequest
from hotswap.core.errors import PlanError, RequestError
from hotswap.core.request import WaitingReason
from hotswap.core.sampling_params import SamplingParams
from hotswap.core.testing.scheduling_harness import SchedulingHarness, fake_request
from hotswap.plugins.schedulers.continuous_batching import ContinuousBatching
from hotswap.plugins.schedulers.policies.fcfs import Fcfs
from hotswap.plugins.schedulers.victims.newest import Newest


class Stingy(Fcfs):
    """Gives nobody anything, ever."""

    def share(self, view: RequestView, budget: Budget) -> int:
        return 0


class Hides(Fcfs):
    """Has requests and shows none."""

    def peek(self) -> RequestView | None:
        return None


class Later(Fcfs):
    """Gives nothing in a few turns, as one that keeps a rate would."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0

    def share(self, view: RequestView, budget: Budget) -> int:
        self.turns += 1
        return 0 if self.turns % PATIENCE_TURNS else budget.num_tokens


class Sleeps(ContinuousBatching):
    """Plans nothing."""

    def schedule(self) -> StepPlan | None:
        return None


def core_with(
    policy: Policy, scheduler: type[ContinuousBatching] = ContinuousBatching, **settings: object
) -> tuple[EngineCore, SchedulingHarness]:
    harness = SchedulingHarness(lambda m: scheduler(m, policy, Newest()), policy, **settings)  # type: ignore[arg-type]
    core = EngineCore(
        harness.mechanism,
        harness.scheduler,
        harness.executor,
        ManualClock(),
        max_steps_in_flight=2,
        logits_width=10_000,
    )
    return core, harness


def run(core: EngineCore, turns: int = 3000) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for _ in range(turns):
        if not core.has_work():
            return tokens
        for update in core.step():
            tokens.setdefault(update.request_id, []).extend(update.new_token_ids)
    raise AssertionError(f"no end after {turns} turns")


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(
    ("policy", "scheduler"), [(Stingy, ContinuousBatching), (Hides, ContinuousBatching), (Fcfs, Sleeps)]
)
def test_every_request_ends(
    policy: type[Policy], scheduler: type[ContinuousBatching], chunked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    core, harness = core_with(
        policy(), scheduler, enable_chunked_prefill=chunked, max_num_batched_tokens=48, num_blocks=12
    )
    for i in range(3):
        harness.add(fake_request(i, [i] * 9, max_tokens=5))
    with caplog.at_level(logging.WARNING):
        tokens = run(core)
    assert tokens == {i: harness.expected_tokens(i) for i in range(3)}
    assert harness.mechanism.kv.pool.num_free_blocks == 12
    (record,) = caplog.records
    assert policy.__name__ in record.getMessage() and scheduler.__name__ in record.getMessage()


def test_a_forced_request_takes_blocks_from_those_behind_it() -> None:
    policy = Fcfs()
    core, harness = core_with(policy, num_blocks=6, max_num_batched_tokens=64, block_size=4)
    for i in range(2):
        harness.add(fake_request(i, [i] * 11, max_tokens=9))
    core.step()
    assert harness.mechanism.num_running == 2
    stingy = Stingy()
    core.set_policy(stingy)
    assert set(run(core)) == {0, 1}
    assert harness.requests[1].num_preemptions > 0 and harness.requests[0].num_preemptions == 0


def test_a_policy_that_holds_back_for_a_while_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    core, harness = core_with(Later())
    harness.add(fake_request(0, [1] * 5, max_tokens=3))
    with caplog.at_level(logging.WARNING):
        assert run(core) == {0: harness.expected_tokens(0)}
    assert not caplog.records


def test_waiting_for_something_else_is_no_lack_of_progress() -> None:
    core, harness = core_with(Fcfs())
    harness.add(fake_request(0, max_tokens=2), waiting_for=WaitingReason.GRAMMAR)
    for _ in range(5 * PATIENCE_TURNS):
        assert core.step() == []
    harness.mechanism.release(0)
    assert run(core) == {0: harness.expected_tokens(0)}


def test_a_scheduler_that_keeps_the_core_from_planning_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotswap.core.engine.engine_core.force_progress", lambda mechanism: None)
    core, harness = core_with(Stingy())
    harness.add(fake_request(0, max_tokens=2))
    with pytest.raises(PlanError, match="scheduler ContinuousBatching with policy Stingy plans nothing although 1"):
        run(core)


# Requests at the engine's door.


def request(number: int, **fields: object) -> EngineRequest:
    return EngineRequest(number, [1, 2, 3], SamplingParams(max_tokens=2), 0.0, **fields)  # type: ignore[arg-type]


def test_a_refusal_keeps_its_code_and_param() -> None:
    core, _ = core_with(Fcfs(), max_num_queued_reqs=1, max_num_seqs=1)
    assert core.add_request(request(1)) is None
    full = core.add_request(request(2))
    assert full is not None
    assert (full.finish_reason, full.error_status, full.error_code) == ("error", 429, "queue_full")
    run(core)
    long = core.add_request(EngineRequest(3, [1] * 500, SamplingParams(max_tokens=2), 0.0))
    assert long is not None and (long.error_code, long.error_param) == ("context_length_exceeded", "prompt")
    unknown = SamplingParams(max_tokens=2, logits_processors={"x": {}})
    named = core.add_request(EngineRequest(4, [1], unknown, 0.0))
    assert named is not None and (named.error_status, named.error_param) == (400, "logits_processors")


def test_the_client_reads_the_refusal_of_the_engine() -> None:
    from hotswap.core.engine.output_processor import OutputProcessor, merge_delta

    outputs = OutputProcessor(None)
    state = outputs.add("label", None, [request(1)])
    update = RequestUpdate(1, [], "error", error="full", error_status=429, error_code="queue_full", error_param="p")
    routed = outputs.apply(update)
    assert routed is not None and routed[0] is state
    total = routed[1]
    assert (total.error, total.error_status, total.error_code, total.error_param) == ("full", 429, "queue_full", "p")
    other = outputs.add("other", None, [request(2)])
    first = outputs.apply(RequestUpdate(2, [7], queue_seconds=1.5, prefill_seconds=0.5))
    assert first is not None and first[0] is other
    merge_delta(first[1], total)
    assert (first[1].error_code, first[1].error_param) == ("queue_full", "p")
    assert (first[1].queue_seconds, first[1].prefill_seconds) == ([1.5], [0.5])


INFO = EngineInfo("tiny", "Tiny", "float32", 64, 63, 512, 16, 16, 4, 64, "cpu")


def test_choice_0_alone_computes_the_prompts_scores() -> None:
    inputs = InputProcessor(INFO, None, (), ManualClock(), InputLimits())
    params = SamplingParams(n=3, prompt_logprobs=2, max_tokens=2)
    assert [r.sampling.prompt_logprobs for r in inputs.process([1, 2, 3], params)] == [2, None, None]


def test_a_priority_needs_a_policy_that_uses_it() -> None:
    inputs = InputProcessor(INFO, None, (), ManualClock(), InputLimits())
    assert inputs.process([1], SamplingParams(max_tokens=1), priority=0)
    with pytest.raises(RequestError, match="priority -3: the active policy") as caught:
        inputs.process([1], SamplingParams(max_tokens=1), priority=-3)
    assert (caught.value.param, caught.value.status) == ("priority", 400)
    changed = EngineInfo("tiny", "Tiny", "float32", 64, 63, 512, 16, 16, 4, 64, "cpu", uses_priority=True)
    inputs.refresh(changed)
    assert inputs.process([1], SamplingParams(max_tokens=1), priority=-3)[0].priority == -3


def test_the_engine_takes_no_priority_that_its_policy_does_not_use() -> None:
    core, harness = core_with(Fcfs(), max_num_seqs=1)
    for number, priority in ((1, 5), (2, -5)):
        core.add_request(request(number, priority=priority))
    assert [view.priority for view in harness.mechanism.policy.waiting()] == [0, 0]
    assert list(run(core)) == [1, 2]
