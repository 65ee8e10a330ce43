"""The fake device must see what a real one would get wrong."""

from __future__ import annotations

from typing import Any

import pytest

from hotswap.core.contracts.plan import NewRequest, ScheduledRequest, StepPlan
from hotswap.core.sampling_params import SamplingParams
from hotswap.core.testing.scripted_executor import IllegalPlanError, ScriptedExecutor


def executor() -> ScriptedExecutor:
    return ScriptedExecutor(
        6, 4, max_num_seqs=2, max_num_batched_tokens=12, script=lambda request_id, index: 50 + index
    )


def new(request_id: int, tokens: list[int], blocks: list[int], computed: int = 0) -> NewRequest:
    return NewRequest(request_id, tokens, len(tokens), SamplingParams(max_tokens=5), [blocks], computed)


def plan(step_id: int, rows: list[tuple[Any, ...]], added: list[NewRequest] | None = None, **changes: Any) -> StepPlan:
    scheduled = [ScheduledRequest(*row) for row in rows]
    fields: dict[str, Any] = {"removed": [], "num_tokens": sum(row.num_tokens for row in scheduled)}
    return StepPlan(step_id=step_id, new=added or [], scheduled=scheduled, **(fields | changes))


def started() -> ScriptedExecutor:
    """Request 0 has computed [1, 2, 3, 4, 5] in blocks 1 and 2, drawn 50, and nothing is in flight."""
    device = executor()
    first = plan(0, [(0, 5, 0, True)], [new(0, [1, 2, 3, 4, 5], [1, 2])])
    device.execute(first)
    device.sample(first, None)
    assert device.next_result().rows[0].token_ids == [50]
    return device


def test_a_legal_run() -> None:
    device = started()
    device.execute(plan(1, [(0, 1, 5, True), (1, 1, 4, True)], [new(1, [1, 2, 3, 4, 9], [1, 3], computed=4)]))
    assert [row.token_ids for row in device.next_result().rows] == [[51], [50]]
    device.execute(plan(2, [(1, 1, 5, False)], removed=[0]))
    assert device.held == {1}
    assert device.next_result().rows[0].token_ids == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (plan(0, [(0, 1, 5, True)]), "step 0 after step 0"),
        (plan(1, []), "without rows"),
        (plan(1, [(0, 1, 5, True)], num_tokens=2), "the plan says 2"),
        (plan(1, [(0, 1, 5, True), (0, 1, 6, True)]), "scheduled twice"),
        (plan(1, [(0, 0, 5, False)]), "scheduled with 0 tokens"),
        (plan(1, [(0, 1, 4, True)]), "is at 5, the plan says 4"),
        (plan(1, [(0, 2, 5, True)]), "position 6 has no token yet"),
        (plan(1, [(7, 1, 5, True)]), "holds no slot"),
        (plan(1, [(0, 1, 5, True)], removed=[7]), "holds no slot"),
        (plan(1, [(0, 1, 5, True)], removed=[0]), "holds no slot"),
        (plan(1, [(0, 1, 5, True)], removed=[0, 0]), "removed twice"),
        (plan(1, [(0, 5, 0, True)], [new(0, [1, 2, 3, 4, 5], [3, 4])]), "is new, but holds a slot"),
        (plan(1, [(0, 1, 5, True)], [new(1, [1], [3])]), "a new request is not scheduled"),
        (plan(1, [(1, 5, 0, True)], [new(1, [1, 2, 3, 4, 5], [3])]), "no block for position 4"),
        (plan(1, [(1, 4, 0, True)], [new(1, [1, 2, 3, 4], [0])]), "holds block 0"),
        (plan(1, [(1, 4, 0, True)], [new(1, [1, 2, 3, 4], [7])]), "holds block 7"),
        (plan(1, [(1, 4, 0, True)], [new(1, [1, 2, 3, 4], [2])]), "but request 0 holds it"),
        (
            plan(1, [(1, 1, 4, True)], [new(1, [9, 2, 3, 4, 5], [1, 3], computed=4)]),
            "does not hold the KV of position 0",
        ),
        (
            plan(1, [(1, 1, 4, True)], [new(1, [1, 2, 3, 4, 5], [5, 3], computed=4)]),
            "does not hold the KV of position 0",
        ),
        (plan(1, [(1, 1, 4, True)], [new(1, [1, 2, 3, 4], [1], computed=4)]), "tokens left to compute"),
        (plan(1, [(1, 13, 0, True)], [new(1, [1] * 13, [3, 4, 5, 6])]), "13 tokens in a step of 12"),
        (plan(1, [(1, 2, 0, True)], [new(1, [1, 2, 3], [3])]), "samples before its last token"),
        (
            plan(1, [(i, 1, 0, True) for i in (1, 2)], [new(i, [1], [i + 2]) for i in (1, 2)]),
            "3 requests in a batch of 2",
        ),
    ],
)
def test_illegal_plans(bad: StepPlan, message: str) -> None:
    device = started()
    with pytest.raises(IllegalPlanError, match=message):
        device.execute(bad)


def test_a_block_that_a_step_in_flight_touches_is_not_written_by_another() -> None:
    device = started()
    device.execute(plan(1, [(0, 1, 5, True)]))
    reuse = plan(2, [(1, 4, 0, True)], [new(1, [1, 2, 3, 4], [2])], removed=[0])
    with pytest.raises(IllegalPlanError, match="block 2 goes to request 1, but step 1 in flight touches it"):
        device.execute(reuse)


def test_nothing_is_drawn_past_max_tokens() -> None:
    device = started()
    for i in range(1, 5):
        device.execute(plan(i, [(0, 1, 4 + i, True, [[3]] if i == 4 else None)]))
        device.next_result()
    with pytest.raises(IllegalPlanError, match="past max_tokens"):
        device.execute(plan(5, [(0, 1, 9, True)]))


def test_copied_blocks_hold_what_was_copied() -> None:
    device = started()
    copied = plan(1, [(1, 1, 4, True)], [new(1, [1, 2, 3, 4, 5], [4, 3], computed=4)], block_copies=[(0, 1, 4)])
    device.execute(copied)
    assert device.next_result().rows[0].token_ids == [50]


def test_sample_belongs_to_the_plan_executed_last() -> None:
    device = started()
    with pytest.raises(IllegalPlanError, match="not executed last"):
        device.sample(plan(1, [(0, 1, 5, True)]), None)
