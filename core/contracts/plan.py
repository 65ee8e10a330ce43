"""The messages between scheduler, executor and runner: plain ints and arrays, no reference to a Request object.

A `StepPlan` is a delta: the runner keeps its own state per request (persistent batch) and applies new, continued and removed.
Tensor and pipeline parallel, the simulator and replay all read the same thing.
"""

from __future__ import annotations

import msgspec

from ..sampling_params import SamplingParams


class NewRequest(msgspec.Struct, array_like=True):
    """A request that enters the runner's batch: for the first time, or again after preemption.

    token_ids: every token known to the scheduler, prompt first, then outputs that were confirmed before a preemption.
    block_ids: one list per cache group.
    num_computed_tokens: how many of token_ids have their KV in those blocks already (prefix hits).
    """

    request_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: list[list[int]]
    num_computed_tokens: int


class ScheduledRequest(msgspec.Struct, array_like=True):
    """One row of a step's batch, in batch order.

    num_tokens: how many tokens past `num_scheduled_tokens_before` are computed in this step.
    num_scheduled_tokens_before: the request's scheduled count before this step. It is an upper bound of what will be
        confirmed; on the device the count that positions derive from is the runner's own.
    samples: whether this step's last token is the last one known (or a placeholder), so that a token is drawn.
    new_block_ids: blocks appended per cache group in this step; None when there are none.
    """

    request_id: int
    num_tokens: int
    num_scheduled_tokens_before: int
    samples: bool
    new_block_ids: list[list[int]] | None = None


class StepPlan(msgspec.Struct, array_like=True):
    """What the device is to do in one step.

    removed: requests whose slots the runner frees before it adds `new` (finished, aborted or preempted).
    scheduled: the batch; a request in `new` is always in it as well.
    block_copies: (cache group, source block, destination block), done before the forward (copy-on-write).
    """

    step_id: int
    new: list[NewRequest]
    removed: list[int]
    scheduled: list[ScheduledRequest]
    num_tokens: int
    block_copies: list[tuple[int, int, int]] = []


class PositionLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the requested alternatives, best first.

    ranks: 1 is the most probable token of the raw distribution. Values are natural logs of the raw model's softmax.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class RowResult(msgspec.Struct, array_like=True):
    """What one request got out of a step.

    token_ids: tokens drawn (empty while a prompt is still being computed; more than one under speculation).
    prompt_logprobs: (first position, one entry per position). Position p is about prompt token p given those before it, so
        the first is at least 1; a step that computes tokens [s, e) covers s + 1 .. e, as far as the prompt goes.
    error: the reason, when the fault belongs to this request alone; the request then ends.
    """

    request_id: int
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: tuple[int, list[PositionLogprobs]] | None = None
    error: str | None = None


class StepResult(msgspec.Struct, array_like=True):
    """What the device did in one step: one row per scheduled request, in the plan's order."""

    step_id: int
    rows: list[RowResult]
    execute_seconds: float = 0.0
