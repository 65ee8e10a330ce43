"""The worker: applies plans to the persistent batch, runs the model, draws tokens. One device, one thread.

Nothing here knows a phase: a row of a step is some tokens of one request, whatever they are for. Rows that draw a token
are picked out of the hidden states after the forward; prompt log-probabilities are computed from the hidden rows of
their chunk, a slice at a time, so that a long prompt never needs its whole matrix of logits.

On a device that works asynchronously nothing here waits for it but the callable that `launch_sample` gives: what the host
needs to know is on its way there when that is made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..contracts.attention import LayerCache
from ..contracts.executor import Worker
from ..contracts.model import Model
from ..contracts.plan import NewRequest, RowResult, StepPlan, StepResult
from ..contracts.platform import Platform
from ..kv_cache.block_pool import NULL_BLOCK
from ..layers.ops import OpTable
from .edits import History
from .graphs import DecodeResult, GraphRunner, Progress, unsupported
from .input_batch import BatchRequest, InputBatch, StepRows
from .kv_cache import MemoryTable, copy_blocks, poison_blocks
from .logprobs import position_logprobs
from .penalties import PenaltyPool, penalties_of
from .processed import processed_logits
from .processors import ActiveProcessor, ProcessedRows, ProcessorChain
from .prompt_logprobs import PromptChunk, PromptDescription, describe_prompt, owes_prompt, prompt_chunks
from .sampler import FAULTS, NOT_FINITE, NOTHING_LEFT, sample
from .sampling_rows import SamplingBatch, SamplingRow, build_batch, resolve_row
from .step_buffers import StepBuffers
from .step_context import GroupCache, StepContext
from .transfer import Download, Transfers

logger = logging.getLogger("hotswap.runner")


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What buffers are sized by. logits_width: columns of the model's logits. max_graph_tokens: of a step that is replayed
    from a graph; 0: no graphs."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    logits_width: int
    max_graph_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step between `execute` and `sample`. places: rows that draw a token, as indices into rows.requests. hidden: of
    those rows; nobody's where a graph decoded them."""

    step_id: int
    rows: StepRows
    buffers: StepBuffers
    places: list[int]
    hidden: Tensor
    decoded: DecodeResult | None
    chunks: list[PromptChunk]
    started: float


@dataclass(frozen=True, slots=True)
class _SamplingPlan:
    """What sampling needs that stays the same while the same requests sample. key: those requests, in order."""

    key: list[int]
    batch: SamplingBatch
    slots: Tensor
    num_prompt_tokens: Tensor
    processed: tuple[ProcessedRows, ...]

    @property
    def is_plain(self) -> bool:
        """Whether every row takes its best token, and that is all."""
        return self.batch.edits is None and not self.batch.groups and not self.batch.logprob_rows


@dataclass(slots=True)
class _Outcome:
    """What the host is going to know of a step. drawn: token ids and fault codes, or the best logits where `is_plain`.
    logprobs: of the rows `logprob_places`. names: the processors that serve a row, for its message."""

    drawn: Download | None = None
    is_plain: bool = False
    logprobs: Download | None = None
    logprob_places: list[int] = field(default_factory=list)
    num_logprobs: tuple[int, ...] = ()
    prompts: list[PromptDescription] = field(default_factory=list)


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
        ops: OpTable,
        transfers: Transfers,
        *,
        memory: MemoryTable | None = None,
        platform: Platform | None = None,
        processors: Sequence[ActiveProcessor] = (),
        poison: bool = False,
        processed_logprobs: bool = False,
    ) -> None:
        self.memory = memory or MemoryTable()
        self._model = model
        self._groups = tuple(groups)
        self._caches = caches
        self._context = StepContext(self._groups, caches, ops)
        self._limits = limits
        self._ops = ops
        self._transfers = transfers
        self._platform = platform
        self._batch = InputBatch(
            limits.max_num_seqs, limits.max_model_len, limits.block_size, len(groups), ops, transfers
        )
        self._rows: dict[int, SamplingRow] = {}
        self._prompt_logprobs: dict[int, int] = {}  # request -> alternatives, for those that ask
        self._pool = PenaltyPool(limits.logits_width, transfers, limits.max_num_seqs)
        self._processors = ProcessorChain(processors, transfers)
        self._poisons = poison
        self._processed_logprobs = processed_logprobs
        self._graphs: GraphRunner | None = None  # set by capture_graphs
        if poison:
            self._poison([[NULL_BLOCK]] * len(self._groups))
        self._pending: _Pending | None = None
        self._sampling: _SamplingPlan | None = None

    @torch.inference_mode()
    def capture_graphs(self, progress: Progress | None = None) -> int:
        """Captures the ladder of graphs, where device, model, attention backends and `limits` allow; returns how many."""
        if self._platform is None or not self._platform.supports_graphs or not self._limits.max_graph_tokens:
            return 0
        backends = [served.backend for served in self._groups]
        reason = unsupported(self._model, backends)
        if reason is not None:
            logger.info("no graphs are captured: %s", reason)
            return 0
        able = {backend.capabilities.graph_capture for backend in backends}
        graphs = GraphRunner(
            self._model,
            self._context,
            self._batch,
            self._ops,
            self._platform,
            self._transfers,
            max_model_len=self._limits.max_model_len,
            max_rows=min(self._limits.max_num_seqs, self._limits.max_graph_tokens),
            max_tokens=self._limits.max_graph_tokens if able == {"any"} else 0,
        )
        graphs.capture(progress)
        self._graphs = graphs
        return graphs.num_graphs

    # Worker.

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Raises RuntimeError on a plan that contradicts the batch; what the model raises comes through."""
        if self._pending is not None:
            raise RuntimeError(f"step {plan.step_id} begins, but step {self._pending.step_id} has not been sampled")
        started = time.perf_counter()
        for request_id in plan.removed:
            self._remove(request_id)
        self._add(plan.new)
        self._processors.flush()
        if self._poisons:
            self._poison(self._fresh_blocks(plan))
        if plan.block_copies:
            self._copy_blocks(plan.block_copies)
        rows = self._batch.advance(plan.scheduled)
        places = [place for place, row in enumerate(plan.scheduled) if row.samples]
        wants_all = bool(self._prompt_logprobs) and owes_prompt(rows, self._prompt_logprobs)
        draws_all = len(places) == len(rows.requests)
        buffers, hidden, decoded = self._forward(rows, draws_all=draws_all, wants_all=wants_all)
        chunks = prompt_chunks(rows, hidden, self._prompt_logprobs) if wants_all else []
        if decoded is None and len(places) != len(hidden):
            drawing = [rows.starts[place + 1] - 1 for place in places] if wants_all else places
            hidden = hidden.index_select(0, self._transfers.upload(drawing, torch.int64))
        self._pending = _Pending(plan.step_id, rows, buffers, places, hidden, decoded, chunks, started)

    def _forward(
        self, rows: StepRows, *, draws_all: bool, wants_all: bool
    ) -> tuple[StepBuffers, Tensor, DecodeResult | None]:
        """Runs the model over a step: hidden states of the rows' last tokens, or of all tokens, and what a decode graph made
        of them."""
        if self._graphs is not None and not wants_all:
            step = self._graphs.run(rows, decode=draws_all and rows.is_decode)
            if step is not None:
                return step.buffers, step.hidden, step.decoded
        buffers = self._batch.lay_out(rows)
        self._context.prepare(self._batch.geometries(buffers, rows))
        embeds = self._model.embed(buffers.input_ids)
        if wants_all or rows.is_decode:
            return buffers, self._model.forward(embeds, buffers.positions, self._context), None
        last = (buffers.starts[1:] - 1).to(torch.int64)
        return buffers, self._model.forward_rows(embeds, buffers.positions, self._context, last), None

    def sample(self, plan: StepPlan, masks: Mapping[int, Tensor] | None) -> StepResult:
        """Raises RuntimeError when `plan` is not the step executed last."""
        return self.launch_sample(plan, masks)()

    @torch.inference_mode()
    def launch_sample(self, plan: StepPlan, masks: Mapping[int, Tensor] | None) -> Callable[[], StepResult]:
        """Raises RuntimeError when `plan` is not the step executed last."""
        pending = self._pending
        if pending is None or pending.step_id != plan.step_id:
            raise RuntimeError(f"step {plan.step_id} was not executed last")
        self._pending = None
        outcome = _Outcome()
        if pending.places:
            self._draw(pending, masks or {}, outcome)
        for chunk in pending.chunks:
            tokens = self._batch.tokens(chunk.request, chunk.first, chunk.first + len(chunk.hidden))
            outcome.prompts.append(describe_prompt(chunk, tokens, self._model, self._ops, self._transfers))
        pending.chunks.clear()  # they hold the hidden states of the whole step, which the next one needs the memory of
        return lambda: self._result(pending, outcome)

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
        try:
            if self._platform is not None:
                self._platform.synchronize()
        finally:  # after a fault of the device, too
            self._graphs = None
            self._caches.clear()

    # Requests.

    def _add(self, news: Sequence[NewRequest]) -> None:
        for new, request in zip(news, self._batch.add(news), strict=True):
            penalty_row = None
            penalties = penalties_of(new.sampling)
            if penalties is not None:
                tokens = self._batch.tokens(request, 0, len(new.token_ids))
                penalty_row = self._pool.add(
                    penalties, tokens[: new.num_prompt_tokens], tokens[new.num_prompt_tokens :]
                )
            self._rows[new.request_id] = resolve_row(
                new.sampling,
                new.request_id,
                self._limits.logits_width,
                self._transfers,
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
                at = self._transfers.upload(ids, torch.int64)
                poison_blocks(served.group, served.backend.layout, self._caches, at)

    def _copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        for index, served in enumerate(self._groups):
            pairs = [(source, destination) for group, source, destination in copies if group == index]
            if pairs:
                at = self._transfers.upload(pairs, torch.int64)
                copy_blocks(served.group, served.backend.layout, self._caches, at[:, 0], at[:, 1])

    # Sampling.

    def _draw(self, pending: _Pending, masks: Mapping[int, Tensor], outcome: _Outcome) -> None:
        rows, places = pending.rows, pending.places
        plan = self._sampling_plan([rows.requests[place] for place in places], masks)
        decoded = pending.decoded
        logits = self._model.logits(pending.hidden) if decoded is None else decoded.logits
        if logits.shape[1] != self._limits.logits_width:
            raise RuntimeError(
                f"the model gives {logits.shape[1]} logits a row, {self._limits.logits_width} were announced"
            )
        if decoded is not None and plan.is_plain:  # the graph has written the tokens already
            outcome.is_plain = True
            outcome.drawn = self._transfers.download(decoded.token_ids[: len(places)], decoded.best[: len(places)])
            return
        logits = logits[: len(places)]
        positions = pending.buffers.seq_lens[: len(rows.requests)].to(torch.int64)
        if len(places) != len(rows.requests):
            positions = positions.index_select(0, self._transfers.upload(places, torch.int64))
        history = History(self._batch.token_ids, plan.slots, positions, plan.num_prompt_tokens)
        num_failed = len(self._processors.failures)
        drawn = sample(
            logits,
            plan.batch,
            history,
            self._pool,
            self._ops,
            found=None if decoded is None else (decoded.best[: len(places)], decoded.token_ids[: len(places)]),
            overwrite=not plan.batch.logprob_rows,
            process=self._processing(plan, positions),
        )
        if len(self._processors.failures) != num_failed:
            self._sampling = None  # whoever failed is not processed again
        self._batch.write(plan.slots, positions, drawn.token_ids)
        outcome.drawn = self._transfers.download(drawn.token_ids, drawn.faults)
        if plan.batch.logprob_rows:
            if self._processed_logprobs:
                logits = processed_logits(logits, drawn.edited, plan.batch)
            self._describe_drawn(logits, drawn.token_ids, plan.batch, places, outcome)

    def _processing(self, plan: _SamplingPlan, positions: Tensor) -> Callable[[Tensor], Tensor] | None:
        if not plan.processed:
            return None
        return lambda edited: self._processors.apply(edited, plan.processed, self._batch.token_ids, positions)

    def _describe_drawn(
        self, logits: Tensor, token_ids: Tensor, batch: SamplingBatch, places: list[int], outcome: _Outcome
    ) -> None:
        """Log-probabilities of drawn tokens, for the rows that asked."""
        if len(batch.logprob_rows) != len(places):
            at = self._transfers.upload(batch.logprob_rows, torch.int64)
            logits, token_ids = logits.index_select(0, at), token_ids.index_select(0, at)
        found = self._ops.gather_logprobs(logits, token_ids, max(batch.num_logprobs))
        outcome.logprobs = self._transfers.download(*found)
        outcome.logprob_places = [places[row] for row in batch.logprob_rows]
        outcome.num_logprobs = batch.num_logprobs

    def _sampling_plan(self, requests: Sequence[BatchRequest], masks: Mapping[int, Tensor]) -> _SamplingPlan:
        key = [request.request_id for request in requests]
        if self._sampling is not None and self._sampling.key == key and not masks:
            return self._sampling
        self._sampling = None  # before the new one is made: its masks may be large
        at_place = {place: masks[request_id] for place, request_id in enumerate(key) if request_id in masks}
        rows = [self._rows[request_id] for request_id in key]
        slots = self._transfers.upload([request.slot for request in requests], torch.int64)
        batch = build_batch(rows, at_place, self._limits.logits_width, self._transfers)
        num_prompt_tokens = self._batch.num_prompt_tokens.index_select(0, slots)
        processed: tuple[ProcessedRows, ...] = ()
        if self._processors and batch.edits is not None:
            processed = self._processors.group(key, batch.edits.places, slots, num_prompt_tokens)
        plan = _SamplingPlan(key, batch, slots, num_prompt_tokens, processed)
        self._sampling = None if masks else plan
        return plan

    # Results: the host's side, once the device is done.

    def _result(self, pending: _Pending, outcome: _Outcome) -> StepResult:
        rows = [RowResult(request.request_id, []) for request in pending.rows.requests]
        if outcome.drawn is not None:
            self._take_drawn(outcome.drawn, outcome.is_plain, pending.places, rows)
        if outcome.logprobs is not None:
            ids, logprobs, ranks = outcome.logprobs.wait()
            found = position_logprobs(ids, logprobs, ranks, outcome.num_logprobs)
            for place, entry in zip(outcome.logprob_places, found, strict=True):
                if rows[place].error is None:
                    rows[place].logprobs = [entry]
        for prompt in outcome.prompts:
            entries = prompt.entries()
            if entries is None:
                row = rows[prompt.place]
                row.error, row.token_ids, row.logprobs = FAULTS[NOT_FINITE], [], None
            else:
                rows[prompt.place].prompt_logprobs = (prompt.first, entries)
        if self._processors.failures:
            self._end_failed(rows)
        return StepResult(pending.step_id, rows, time.perf_counter() - pending.started)

    def _take_drawn(self, drawn: Download, is_plain: bool, places: list[int], rows: list[RowResult]) -> None:
        token_ids, second = drawn.wait()
        if is_plain:
            faults = torch.isfinite(second).logical_not_().to(torch.int64)  # NOT_FINITE is 1
        else:
            faults = second
        for place, token_id, fault in zip(places, token_ids.tolist(), faults.tolist(), strict=True):
            if fault:
                rows[place].error = self._explained(fault, rows[place].request_id)
            else:
                rows[place].token_ids.append(token_id)

    def _explained(self, fault: int, request_id: int) -> str | None:
        """A sampling fault, with the processors that may be behind it."""
        names = self._processors.names(request_id) if fault == NOTHING_LEFT else ""
        if names:
            return f"no token can be drawn: {names} left no logit, or one that is not a number"
        return FAULTS[fault]

    def _end_failed(self, results: list[RowResult]) -> None:
        for result in results:
            fault = self._processors.failures.get(result.request_id)
            if fault is not None:
                result.error, result.token_ids, result.logprobs = fault, [], None
