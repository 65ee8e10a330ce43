"""An executor without a model: it runs step plans on a made-up KV cache, and refuses any plan that a device would get
wrong.

What is stored per (block, offset) is a digest of every token up to that position, of the adapter and of the tenant.
Before a token is drawn, the row's block table must lead to the digests of exactly its own tokens. So wrong sharing,
reuse of a block that is still in use, lost or doubled deltas and wrong counts are all seen where they do harm, whatever
caused them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..contracts.executor import Executor
from ..contracts.plan import NewRequest, PositionLogprobs, RowResult, ScheduledRequest, StepPlan, StepResult
from ..request import Request

Script = Callable[[int, int], int]  # (request id, output index) -> the token drawn there


class IllegalPlanError(AssertionError):
    """A plan that would make a device compute something wrong."""


@dataclass(slots=True)
class _Slot:
    """What the runner knows of a request: every token so far, drawn ones included, and its block table."""

    new: NewRequest
    tokens: list[int]
    blocks: list[int]
    num_computed: int
    lineage: bytes


@dataclass(slots=True)
class _Flight:
    plan: StepPlan
    result: StepResult
    blocks: dict[int, set[int]] = field(default_factory=dict)  # request -> blocks that this step reads or writes


class ScriptedExecutor(Executor):
    """Draws `script(request id, output index)`; fails where `errors` says so (same arguments, a reason or None).

    requests: the live ones by id, for what a plan does not carry (adapter, salt). A test that has no salts may leave it
        out.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        script: Script,
        errors: Callable[[int, int], str | None] = lambda request_id, index: None,
        requests: Mapping[int, Request] | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_steps = 0
        self.num_tokens_computed = 0
        self._script = script
        self._errors = errors
        self._requests = requests if requests is not None else {}
        self._slots: dict[int, _Slot] = {}
        self._cache: dict[tuple[int, int], bytes] = {}
        self._flights: deque[_Flight] = deque()
        self._last_step_id = -1

    @property
    def held(self) -> set[int]:
        """Requests that occupy a slot of the batch."""
        return set(self._slots)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def execute(self, plan: StepPlan) -> None:
        """Applies and runs the plan. Raises IllegalPlanError."""
        _check(plan.step_id > self._last_step_id, f"step {plan.step_id} after step {self._last_step_id}")
        self._last_step_id = plan.step_id
        self._apply_deltas(plan)
        self._check_shape(plan)
        flight = _Flight(plan, StepResult(plan.step_id, []))
        for row in plan.scheduled:
            self._extend_table(row)
        for row in plan.scheduled:
            slot = self._slots[row.request_id]
            last = -(-(slot.num_computed + row.num_tokens) // self.block_size)
            flight.blocks[row.request_id] = set(slot.blocks[:last])
        for row in plan.scheduled:
            flight.result.rows.append(self._run(row))
        self._flights.append(flight)
        self.num_steps += 1
        self.num_tokens_computed += plan.num_tokens

    def sample(self, plan: StepPlan, masks: Any | None) -> None:
        _check(bool(self._flights) and self._flights[-1].plan is plan, "sample() of a plan that was not executed last")

    def next_result(self) -> StepResult:
        return self._flights.popleft().result

    def collective(self, method: str, *args: Any) -> list[Any]:
        raise NotImplementedError(f"the scripted executor knows no method {method!r}")

    def check_health(self) -> None:
        """Always well."""

    def shutdown(self) -> None:
        self._flights.clear()
        self._slots.clear()

    def _apply_deltas(self, plan: StepPlan) -> None:
        _check(len(set(plan.removed)) == len(plan.removed), f"removed twice: {plan.removed}")
        for request_id in plan.removed:
            _check(request_id in self._slots, f"request {request_id} is removed, but holds no slot")
            del self._slots[request_id]
        for _group, source, target in plan.block_copies:
            for offset in range(self.block_size):
                if (source, offset) in self._cache:
                    self._cache[target, offset] = self._cache[source, offset]
        for new in plan.new:
            _check(new.request_id not in self._slots, f"request {new.request_id} is new, but holds a slot")
            _check(len(new.block_ids) == 1, f"{len(new.block_ids)} block lists for one cache group")
            _check(0 <= new.num_computed_tokens < len(new.token_ids), "a new request must have tokens left to compute")
            fresh = new.block_ids[0][new.num_computed_tokens // self.block_size :]
            self._check_fresh(new.request_id, fresh)
            self._slots[new.request_id] = _Slot(
                new, list(new.token_ids), list(new.block_ids[0]), new.num_computed_tokens, self._lineage(new.request_id)
            )
        _check(len(self._slots) <= self.max_num_seqs, f"{len(self._slots)} requests in a batch of {self.max_num_seqs}")

    def _check_shape(self, plan: StepPlan) -> None:
        ids = [row.request_id for row in plan.scheduled]
        _check(bool(ids), "a plan without rows")
        _check(len(set(ids)) == len(ids), f"a request is scheduled twice: {ids}")
        _check({new.request_id for new in plan.new} <= set(ids), "a new request is not scheduled")
        total = sum(row.num_tokens for row in plan.scheduled)
        _check(total == plan.num_tokens, f"{total} tokens scheduled, the plan says {plan.num_tokens}")
        _check(total <= self.max_num_batched_tokens, f"{total} tokens in a step of {self.max_num_batched_tokens}")

    def _extend_table(self, row: ScheduledRequest) -> None:
        _check(row.request_id in self._slots, f"request {row.request_id} is scheduled, but holds no slot")
        slot = self._slots[row.request_id]
        if row.new_block_ids is not None:
            _check(len(row.new_block_ids) == 1, f"{len(row.new_block_ids)} block lists for one cache group")
            self._check_fresh(row.request_id, row.new_block_ids[0])
            slot.blocks.extend(row.new_block_ids[0])
        end = row.num_scheduled_tokens_before + row.num_tokens
        _check(row.num_tokens > 0, f"request {row.request_id} is scheduled with {row.num_tokens} tokens")
        _check(
            row.num_scheduled_tokens_before == slot.num_computed,
            f"request {row.request_id} is at {slot.num_computed}, the plan says {row.num_scheduled_tokens_before}",
        )
        _check(end <= len(slot.tokens), f"request {row.request_id}: position {end - 1} has no token yet")
        _check(end <= len(slot.blocks) * self.block_size, f"request {row.request_id}: no block for position {end - 1}")
        _check(not row.samples or end == len(slot.tokens), f"request {row.request_id} samples before its last token")
        limit = slot.new.sampling.max_tokens
        drawn = len(slot.tokens) - slot.new.num_prompt_tokens
        _check(not row.samples or limit is None or drawn < limit, f"request {row.request_id} samples past max_tokens")
        for block in slot.blocks:
            _check(1 <= block <= self.num_blocks, f"request {row.request_id} holds block {block}")

    def _check_fresh(self, request_id: int, blocks: Sequence[int]) -> None:
        """A block that is about to be written must be out of use: in nobody's table, and touched by no step in
        flight.
        """
        for block in blocks:
            for other, slot in self._slots.items():
                _check(
                    block not in slot.blocks,
                    f"block {block} goes to request {request_id}, but request {other} holds it",
                )
            for flight in self._flights:
                touching = [other for other, touched in flight.blocks.items() if block in touched]
                _check(
                    not touching,
                    f"block {block} goes to request {request_id}, but step {flight.plan.step_id} in flight touches it",
                )

    def _run(self, row: ScheduledRequest) -> RowResult:
        slot = self._slots[row.request_id]
        start, end = slot.num_computed, slot.num_computed + row.num_tokens
        digest = self._verify_prefix(row.request_id, slot, start)
        written = set(slot.blocks[start // self.block_size : -(-end // self.block_size)])
        for other_id, other in self._slots.items():
            shared = written.intersection(other.blocks) if other is not slot else ()
            _check(
                not shared, f"request {row.request_id} writes into blocks {shared}, which request {other_id} holds too"
            )
        for position in range(start, end):
            digest = _digest(digest, slot.tokens[position])
            self._cache[slot.blocks[position // self.block_size], position % self.block_size] = digest
        slot.num_computed = end
        result = RowResult(row.request_id, [])
        num_prompt = slot.new.num_prompt_tokens
        if slot.new.sampling.prompt_logprobs is not None and start + 1 < num_prompt:
            positions = range(start + 1, min(end + 1, num_prompt))
            result.prompt_logprobs = (start + 1, [prompt_logprob(slot.tokens, position) for position in positions])
        if row.samples:
            index = len(slot.tokens) - num_prompt
            token = self._script(row.request_id, index)
            slot.tokens.append(token)
            result.token_ids = [token]
            result.error = self._errors(row.request_id, index)
        return result

    def _verify_prefix(self, request_id: int, slot: _Slot, stop: int) -> bytes:
        """The digest at `stop`, after every position before it was found in the cache where the table says."""
        digest = slot.lineage
        for position in range(stop):
            digest = _digest(digest, slot.tokens[position])
            block = slot.blocks[position // self.block_size]
            found = self._cache.get((block, position % self.block_size))
            _check(found == digest, f"request {request_id}: block {block} does not hold the KV of position {position}")
        return digest

    def _lineage(self, request_id: int) -> bytes:
        request = self._requests.get(request_id)
        return repr((request.adapter_key, request.cache_salt) if request is not None else ("", None)).encode()


def prompt_logprob(tokens: Sequence[int], position: int) -> PositionLogprobs:
    """What the scripted executor reports for a prompt position: a function of the tokens up to it."""
    return PositionLogprobs([tokens[position]], [-float(sum(tokens[: position + 1]))], [1])


def _digest(before: bytes, token: int) -> bytes:
    return hashlib.blake2b(before + b"%d" % token, digest_size=8).digest()


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise IllegalPlanError(message)
