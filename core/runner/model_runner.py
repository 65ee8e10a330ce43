"""The worker: applies plans to the persistent batch, runs the model, draws tokens. One device, one thread.

Nothing here knows a phase: a row of a step is some tokens of one request, whatever they are for. Rows that draw a token
are picked out of the hidden states after the forward; prompt log-probabilities are computed from the hidden rows of
their chunk, a slice at a time, so that a long prompt never needs its whole matrix of logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contracts.attention import AttentionBackend, AttentionLayer, BatchGeometry, LayerCache
from ..contracts.executor import Worker
from ..contracts.model import Model
from ..contracts.plan import NewRequest, PositionLogprobs, RowResult, StepPlan, StepResult
from ..kv_cache.block_pool import NULL_BLOCK
from .edits import History
from .input_batch import BatchRequest, InputBatch, StepInputs
from .kv_cache import CacheGroup, MemoryTable, copy_blocks, poison_blocks
from .logprobs import gather_logprobs
from .penalties import PenaltyPool, penalties_of
from .processed import processed_logits
from .processors import ActiveProcessor, ProcessedRows, ProcessorChain
from .sampler import FAULTS, NOTHING_LEFT, describe_faults, sample
from .sampling_rows import SamplingBatch, SamplingRow, build_batch, resolve_row

PROMPT_LOGPROB_SLICE = 64  # rows of logits that exist at once for prompt log-probabilities


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What buffers are sized by. logits_width: columns of the model's logits."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    logits_width: int


@dataclass(frozen=True, slots=True)
class GroupCache:
    """A cache group with the backend that serves it."""

    group: CacheGroup
    backend: AttentionBackend


class StepContext:
    """The ForwardContext of a step: sends each layer's attention to its group's backend and cache."""

    def __init__(self, groups: Sequence[GroupCache], caches: dict[int, LayerCache]) -> None:
        self._groups = groups
        self._layers: dict[int, tuple[AttentionBackend, LayerCache]] = {
            layer: (served.backend, caches[layer]) for served in groups for layer in served.group.layers
        }

    def prepare(self, geometries: Sequence[BatchGeometry]) -> None:
        for served, geometry in zip(self._groups, geometries, strict=True):
            served.backend.prepare(geometry)

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        backend, cache = self._layers[layer.index]
        backend.write_kv(key, value, cache)
        return backend.forward(query, cache, layer)


@dataclass(frozen=True, slots=True)
class _PromptChunk:
    """Hidden rows whose next tokens belong to the prompt. place: the row in the step. first: the position that the
    first of them predicts."""

    request: BatchRequest
    place: int
    first: int
    hidden: Tensor
    count: int  # alternatives


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step between `execute` and `sample`. places: rows that draw a token, as indices into inputs.requests."""

    step_id: int
    inputs: StepInputs
    places: list[int]
    hidden: Tensor  # of those rows
    chunks: list[_PromptChunk]
    seconds: float


@dataclass(frozen=True, slots=True)
class _SamplingPlan:
    """What sampling needs that stays the same while the same requests sample. key: those requests, in order."""

    key: list[int]
    batch: SamplingBatch
    slots: Tensor
    num_prompt_tokens: Tensor
    processed: tuple[ProcessedRows, ...]


class ModelRunner(Worker):
    """model: with weights. caches: (key, value) by layer. memory: the table for the log and for `collective("memory")`.
    processors: the operator's logits processors, in order. poison: fill blocks with NaN before they are written, for
    debugging: whoever reads what was not written gets NaN, and its request an error. processed_logprobs: report drawn
    tokens' log-probabilities after edits, temperature and filters; the prompt's are the raw model's either way.

    `masks` in `sample` is None or a mapping request id -> bool tensor [V] of the tokens that may be drawn.
    """

    def __init__(
        self,
        model: Model,
        groups: Sequence[GroupCache],
        caches: dict[int, LayerCache],
        limits: RunnerLimits,
        device: str,
        *,
        memory: MemoryTable | None = None,
        synchronize: Callable[[], None] | None = None,
        processors: Sequence[ActiveProcessor] = (),
        poison: bool = False,
        processed_logprobs: bool = False,
    ) -> None:
        self.memory = memory or MemoryTable()
        self._model = model
        self._groups = tuple(groups)
        self._caches = caches
        self._context = StepContext(self._groups, caches)
        self._limits = limits
        self._device = device
        self._synchronize = synchronize
        self._batch = InputBatch(limits.max_num_seqs, limits.max_model_len, limits.block_size, len(groups), device)
        self._rows: dict[int, SamplingRow] = {}
        self._prompt_logprobs: dict[int, int] = {}  # request -> alternatives, for those that ask
        self._pool = PenaltyPool(limits.logits_width, device)
        self._processors = ProcessorChain(processors)
        self._poisons = poison
        self._processed_logprobs = processed_logprobs
        if poison:
            self._poison([[NULL_BLOCK]] * len(self._groups))
        self._pending: _Pending | None = None
        self._sampling: _SamplingPlan | None = None

    # Worker.

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Raises RuntimeError on a plan that contradicts the batch; what the model raises comes through."""
        if self._pending is not None:
            raise RuntimeError(f"step {plan.step_id} begins, but step {self._pending.step_id} has not been sampled")
        started = time.perf_counter()
        for request_id in plan.removed:
            self._remove(request_id)
        for new in plan.new:
            self._add(new)
        self._processors.flush()
        if self._poisons:
            self._poison(self._fresh_blocks(plan))
        if plan.block_copies:
            self._copy_blocks(plan.block_copies)
        inputs = self._batch.build(plan)
        self._context.prepare(inputs.geometries)
        hidden = self._model.forward(self._model.embed(inputs.input_ids), inputs.positions, self._context)
        places = [place for place, row in enumerate(plan.scheduled) if row.samples]
        chunks = self._prompt_chunks(inputs, hidden) if self._prompt_logprobs else []
        if len(places) != len(hidden):
            last = [inputs.starts[place + 1] - 1 for place in places]
            hidden = hidden.index_select(0, torch.tensor(last, dtype=torch.int64, device=self._device))
        self._pending = _Pending(plan.step_id, inputs, places, hidden, chunks, time.perf_counter() - started)

    @torch.inference_mode()
    def sample(self, plan: StepPlan, masks: Mapping[int, Tensor] | None) -> StepResult:
        """Raises RuntimeError when `plan` is not the step executed last."""
        pending = self._pending
        if pending is None or pending.step_id != plan.step_id:
            raise RuntimeError(f"step {plan.step_id} was not executed last")
        self._pending = None
        started = time.perf_counter()
        rows = [RowResult(request.request_id, []) for request in pending.inputs.requests]
        if pending.places:
            self._draw(pending, masks or {}, rows)
        for chunk in pending.chunks:
            self._describe_prompt(chunk, rows[chunk.place])
        if self._processors.failures:
            self._end_failed(rows)
        return StepResult(plan.step_id, rows, pending.seconds + time.perf_counter() - started)

    def collective(self, method: str, *args: Any) -> Any:
        """reset: forgets every request. memory: the memory table's lines. Raises ValueError on another name."""
        if method == "reset":
            self._reset()
            return None
        if method == "memory":
            return self.memory.lines()
        raise ValueError(f"unknown worker method {method!r}; known: memory, reset")

    def shutdown(self) -> None:
        self._reset()
        if self._synchronize is not None:
            self._synchronize()
        self._caches.clear()

    # Requests.

    def _add(self, new: NewRequest) -> None:
        request = self._batch.add(new)
        penalty_row = None
        penalties = penalties_of(new.sampling)
        if penalties is not None:
            tokens = self._batch.tokens(request, 0, len(new.token_ids))
            penalty_row = self._pool.add(penalties, tokens[: new.num_prompt_tokens], tokens[new.num_prompt_tokens :])
        self._rows[new.request_id] = resolve_row(
            new.sampling,
            new.request_id,
            self._limits.logits_width,
            self._device,
            penalty_row,
            processed=bool(self._processors and self._processors.add(new, request.slot)),
        )
        # A request that comes back with outputs has had its prompt's log-probabilities delivered.
        if new.sampling.prompt_logprobs is not None and len(new.token_ids) == new.num_prompt_tokens:
            self._prompt_logprobs[new.request_id] = new.sampling.prompt_logprobs
        self._sampling = None  # a request that comes back has another slot

    def _remove(self, request_id: int) -> None:
        self._batch.remove(request_id)
        self._prompt_logprobs.pop(request_id, None)
        self._processors.remove(request_id)
        row = self._rows.pop(request_id, None)
        if row is not None and row.penalty_row is not None:
            self._pool.remove(row.penalty_row)

    def _reset(self) -> None:
        self._batch.clear()
        self._rows.clear()
        self._prompt_logprobs.clear()
        self._pool.clear()
        self._processors.clear()
        self._pending = self._sampling = None

    def _fresh_blocks(self, plan: StepPlan) -> list[list[int]]:
        """Blocks by cache group that requests get in this step and that hold nothing of theirs yet: all but prefix hits."""
        fresh: list[list[int]] = [[] for _ in self._groups]
        for new in plan.new:
            for blocks, its in zip(fresh, new.block_ids, strict=True):
                blocks += its[new.num_computed_tokens // self._limits.block_size :]
        for row in plan.scheduled:
            for blocks, its in zip(fresh, row.new_block_ids or (), strict=False):
                blocks += its
        return fresh

    def _poison(self, blocks: Sequence[Sequence[int]]) -> None:
        for served, ids in zip(self._groups, blocks, strict=True):
            if ids:
                at = torch.tensor(ids, dtype=torch.int64, device=self._device)
                poison_blocks(served.group, served.backend.layout, self._caches, at)

    def _copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for index, served in enumerate(self._groups):
            pairs = [(source, destination) for group, source, destination in copies if group == index]
            if pairs:
                at = torch.tensor(pairs, dtype=torch.int64, device=self._device)
                copy_blocks(served.group, served.backend.layout, self._caches, at[:, 0], at[:, 1])

    # Sampling.

    def _draw(self, pending: _Pending, masks: Mapping[int, Tensor], results: list[RowResult]) -> None:
        inputs, places = pending.inputs, pending.places
        logits = self._model.logits(pending.hidden)
        if logits.shape[1] != self._limits.logits_width:
            raise RuntimeError(
                f"the model gives {logits.shape[1]} logits a row, {self._limits.logits_width} were announced"
            )
        plan = self._sampling_plan([inputs.requests[place] for place in places], masks)
        positions = inputs.seq_lens
        if len(places) != len(inputs.requests):
            positions = positions.index_select(0, torch.tensor(places, dtype=torch.int64, device=self._device))
        history = History(self._batch.token_ids, plan.slots, positions, plan.num_prompt_tokens)
        num_failed = len(self._processors.failures)
        drawn = sample(
            logits,
            plan.batch,
            history,
            self._pool,
            overwrite=not plan.batch.logprob_rows,
            process=self._processing(plan, positions),
        )
        if len(self._processors.failures) != num_failed:
            self._sampling = None  # whoever failed is not processed again
        self._batch.write(plan.slots, positions, drawn.token_ids)
        token_ids, faults = torch.stack((drawn.token_ids, drawn.faults)).tolist()
        for place, token_id, error in zip(places, token_ids, describe_faults(faults), strict=True):
            if error is None:
                results[place].token_ids.append(token_id)
            else:
                results[place].error = self._explained(error, results[place].request_id)
        if plan.batch.logprob_rows:
            if self._processed_logprobs:
                logits = processed_logits(logits, drawn.edited, plan.batch)
            self._describe_drawn(logits, drawn.token_ids, plan.batch, places, results)

    def _processing(self, plan: _SamplingPlan, positions: Tensor) -> Callable[[Tensor], Tensor] | None:
        if not plan.processed:
            return None
        return lambda edited: self._processors.apply(edited, plan.processed, self._batch.token_ids, positions)

    def _explained(self, fault: str, request_id: int) -> str:
        """A sampling fault, with the processors that may be behind it."""
        names = self._processors.names(request_id) if fault == FAULTS[NOTHING_LEFT] else ""
        return f"no token can be drawn: {names} left no logit, or one that is not a number" if names else fault

    def _end_failed(self, results: list[RowResult]) -> None:
        for result in results:
            fault = self._processors.failures.get(result.request_id)
            if fault is not None:
                result.error, result.token_ids, result.logprobs = fault, [], None

    def _sampling_plan(self, requests: Sequence[BatchRequest], masks: Mapping[int, Tensor]) -> _SamplingPlan:
        key = [request.request_id for request in requests]
        if self._sampling is not None and self._sampling.key == key and not masks:
            return self._sampling
        at_place = {place: masks[request_id] for place, request_id in enumerate(key) if request_id in masks}
        rows = [self._rows[request_id] for request_id in key]
        slots = torch.tensor([request.slot for request in requests], dtype=torch.int64, device=self._device)
        batch = build_batch(rows, at_place, self._limits.logits_width, self._device)
        num_prompt_tokens = self._batch.num_prompt_tokens.index_select(0, slots)
        processed: tuple[ProcessedRows, ...] = ()
        if self._processors and batch.edits is not None:
            processed = self._processors.group(key, batch.edits.places, slots, num_prompt_tokens)
        plan = _SamplingPlan(key, batch, slots, num_prompt_tokens, processed)
        self._sampling = None if masks else plan
        return plan

    def _describe_drawn(
        self, logits: Tensor, token_ids: Tensor, batch: SamplingBatch, places: list[int], results: list[RowResult]
    ) -> None:
        """Log-probabilities of drawn tokens, for the rows that asked."""
        if len(batch.logprob_rows) != len(places):
            at = torch.tensor(batch.logprob_rows, dtype=torch.int64, device=self._device)
            logits, token_ids = logits.index_select(0, at), token_ids.index_select(0, at)
        entries = gather_logprobs(logits, token_ids, batch.num_logprobs)
        for row, entry in zip(batch.logprob_rows, entries, strict=True):
            result = results[places[row]]
            if result.error is None:
                result.logprobs = [entry]

    # Prompt log-probabilities.

    def _prompt_chunks(self, inputs: StepInputs, hidden: Tensor) -> list[_PromptChunk]:
        """Hidden rows of this step that predict a prompt token, per request that asked."""
        chunks = []
        for place, request in enumerate(inputs.requests):
            count = self._prompt_logprobs.get(request.request_id)
            if count is None:
                continue
            start, first = inputs.starts[place], inputs.before[place] + 1
            stop = min(inputs.starts[place + 1], start + request.num_prompt_tokens - first)
            if stop > start:
                chunks.append(_PromptChunk(request, place, first, hidden[start:stop], count))
        return chunks

    def _describe_prompt(self, chunk: _PromptChunk, result: RowResult) -> None:
        entries: list[PositionLogprobs] = []
        for start in range(0, len(chunk.hidden), PROMPT_LOGPROB_SLICE):
            logits = self._model.logits(chunk.hidden[start : start + PROMPT_LOGPROB_SLICE])
            first = chunk.first + start
            targets = self._batch.tokens(chunk.request, first, first + len(logits))
            if not bool(torch.isfinite(logits.amax(1)).all()):
                result.error = FAULTS[1]
                result.token_ids, result.logprobs = [], None
                return
            entries += gather_logprobs(logits, targets, [chunk.count] * len(logits))
        result.prompt_logprobs = (chunk.first, entries)
