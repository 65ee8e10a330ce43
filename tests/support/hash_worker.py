"""A model whose output depends on every token and every block of a request's past and on nothing else, a scheduler of a few
lines, and the oracle: for tests of the worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hotswap.core.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    BatchGeometry,
    CacheSpec,
    Capabilities,
    KVLayout,
    LayerCache,
)
from hotswap.core.contracts.model import ForwardContext, LoadReport, Model, WeightSpec
from hotswap.core.contracts.plan import NewRequest, PositionLogprobs, ScheduledRequest, StepPlan, StepResult
from hotswap.core.layers.ops import OpTable
from hotswap.core.runner.edits import History
from hotswap.core.runner.kv_cache import CachePlan, MemoryTable, allocate_cache, group_layers
from hotswap.core.runner.logprobs import position_logprobs
from hotswap.core.runner.model_runner import ModelRunner, RunnerLimits
from hotswap.core.runner.penalties import PenaltyPool, penalties_of
from hotswap.core.runner.sampler import sample
from hotswap.core.runner.sampling_rows import build_batch, resolve_row
from hotswap.core.runner.step_context import GroupCache
from hotswap.core.runner.transfer import Transfers
from hotswap.core.sampling_params import SamplingParams

WIDTH = 211
BLOCK = 4
NUM_BLOCKS = 128
MAX_GRAPH_TOKENS = 20
POISON = 13  # a token that is never drawn and makes every later logit of its request NaN


def hash_step(state: int, token: int) -> int:
    return (state * 7 + token + 1) % 8191


def logits_of(states: Tensor) -> Tensor:
    """float32 [S, WIDTH] from hashes [S]: spread over about +-4, NaN for a poisoned state."""
    scrambled = (states.unsqueeze(1) * (torch.arange(WIDTH) * 2 + 3) + torch.arange(WIDTH) ** 2) % 257
    logits = scrambled.float() / 32 - 4
    logits[:, POISON] = -math.inf
    return torch.where(states.unsqueeze(1) < 0, math.nan, logits)


class HashAttention(AttentionBackend):
    """Each token's output: the hash of all values that its request's block table shows up to it."""

    layout = KVLayout("token_major", ("block", "token", "head", "dim"), ("block", "token", "head", "dim"), ())
    capabilities = Capabilities(("float32",), graph_capture="any")

    def prepare(self, geometry: BatchGeometry) -> None:
        self.geometry = geometry

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None:
        slots = self.geometry.slot_mapping
        cache[1].view(-1)[slots[slots >= 0]] = value.view(-1)[slots >= 0]

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        geometry, outputs = self.geometry, []
        starts, lengths = geometry.query_start_loc.tolist(), geometry.seq_lens.tolist()
        for row, table in enumerate(geometry.block_table.tolist()):
            count = starts[row + 1] - starts[row]
            values = [int(cache[1][table[p // BLOCK], p % BLOCK, 0, 0]) for p in range(lengths[row])]
            state = 0
            for position, token in enumerate(values):
                state = -1 if token == POISON or state < 0 else hash_step(state, token)
                if position >= lengths[row] - count:
                    outputs.append(state)
        outputs += [0] * (len(query) - len(outputs))  # padding
        return torch.tensor(outputs, dtype=query.dtype).view(-1, 1, 1)


class HashModel(Model):
    """One attention layer; hidden = the hash of the prefix."""

    def __init__(self) -> None:
        self.layer = AttentionLayer(0, 1, 1, 1, 1, 1.0)

    def cache_specs(self) -> Sequence[CacheSpec]:
        return [CacheSpec("full", 1, 1, 1, "float32")]

    def weight_specs(self) -> Iterator[WeightSpec]:
        return iter(())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        return LoadReport()

    def embed(self, token_ids: Tensor) -> Tensor:
        return token_ids.view(-1, 1).to(torch.float32)

    def forward(
        self, embeds: Tensor, positions: Tensor, context: ForwardContext, intermediates: dict[str, Tensor] | None = None
    ) -> Tensor:
        heads = embeds.view(-1, 1, 1)
        return context.attend(self.layer, heads, heads, heads).view(-1, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return logits_of(hidden.view(-1).to(torch.int64))


class Replay:
    """A graph that runs what was recorded again, over the buffers that it was recorded with."""

    def __init__(self, run: Callable[[], None], backend: HashAttention) -> None:
        self.run, self.backend, self.geometry = run, backend, backend.geometry

    def replay(self) -> None:
        self.backend.geometry = self.geometry
        self.run()


class HostGraphs:
    """A platform whose `capture` gives what a device's does, as far as a runner can tell. results: what it was to lend."""

    is_asynchronous = False
    supports_graphs = True

    def __init__(self, backend: HashAttention) -> None:
        self.backend = backend
        self.results: list[Tensor] = []

    def empty_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        return Replay(run, self.backend)

    def graph_result(self, tensor: Tensor) -> Tensor:
        self.results.append(tensor)
        return tensor

    def synchronize(self) -> None: ...


def make_runner(
    max_num_seqs: int = 8,
    max_model_len: int = 128,
    *,
    graphs: bool,
    model: Model | None = None,
    platform_type: type[HostGraphs] = HostGraphs,
) -> tuple[ModelRunner, HostGraphs]:
    """With the platform that it runs on. graphs: whether steps of up to MAX_GRAPH_TOKENS tokens may be captured: none is yet
    when this returns."""
    model, backend = model or HashModel(), HashAttention()
    groups, platform = group_layers(model.cache_specs()), platform_type(backend)
    caches = allocate_cache(platform, groups, [backend.layout], CachePlan(NUM_BLOCKS, BLOCK, 32, "test"))  # type: ignore[arg-type]
    limits = RunnerLimits(max_num_seqs, max_model_len, BLOCK, WIDTH, MAX_GRAPH_TOKENS if graphs else 0)
    memory = MemoryTable()
    memory.add("weights", 2**30)
    runner = ModelRunner(
        model,
        [GroupCache(groups[0], backend)],
        caches,
        limits,
        OpTable.reference(),
        Transfers(),
        memory=memory,
        platform=platform,  # type: ignore[arg-type]
    )
    return runner, platform


def gather_logprobs(logits: Tensor, chosen: Tensor, counts: list[int]) -> list[PositionLogprobs]:
    return position_logprobs(*OpTable.reference().gather_logprobs(logits, chosen, max(counts)), counts)


def states(tokens: Sequence[int]) -> list[int]:
    found, state = [], 0
    for token in tokens:
        state = hash_step(state, token)
        found.append(state)
    return found


def alone(prompt: list[int], params: SamplingParams, count: int) -> tuple[list[int], list[PositionLogprobs]]:
    """The oracle: the request by itself, its whole past hashed anew for every token."""
    tokens, entries = list(prompt), []
    for _ in range(count):
        logits = logits_of(torch.tensor(states(tokens)[-1:]))
        pool = PenaltyPool(WIDTH, Transfers())
        known = torch.tensor(tokens)
        penalties = penalties_of(params)
        pool_row = pool.add(penalties, known[: len(prompt)], known[len(prompt) :]) if penalties else None
        history = History(
            known.view(1, -1).to(torch.int32),
            torch.tensor([0]),
            torch.tensor([len(tokens)]),
            torch.tensor([len(prompt)]),
        )
        batch = build_batch([resolve_row(params, 0, WIDTH, Transfers(), pool_row)], {}, WIDTH, Transfers())
        drawn = sample(logits, batch, history, pool, OpTable.reference())
        entries += gather_logprobs(logits, drawn.token_ids, [params.logprobs or 0])
        tokens.append(int(drawn.token_ids))
    return tokens[len(prompt) :], entries


def prompt_entries(prompt: list[int], count: int) -> list[PositionLogprobs]:
    logits = logits_of(torch.tensor(states(prompt)))
    return [gather_logprobs(logits[p - 1 : p], torch.tensor([prompt[p]]), [count])[0] for p in range(1, len(prompt))]


@dataclass
class Tracked:
    """The scheduler's side of a request."""

    prompt: list[int]
    params: SamplingParams
    blocks: list[int] = field(default_factory=list)
    scheduled: int = 0
    placeholders: int = 0
    outputs: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    resident: bool = False
    error: str | None = None

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.outputs) + self.placeholders


class Driver:
    """A scheduler of a few lines that is told what to do: makes plans, keeps them in flight, books results."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.requests: dict[int, Tracked] = {}
        self.free = list(range(NUM_BLOCKS, 0, -1))
        self.removed: list[int] = []
        self.in_flight: list[StepPlan] = []
        self.num_steps = 0

    def add(self, request_id: int, prompt: list[int], **params: Any) -> Tracked:
        self.requests[request_id] = Tracked(prompt, SamplingParams(**params))
        return self.requests[request_id]

    def wanted(self, request_id: int) -> int:
        request = self.requests[request_id]
        return request.known - request.scheduled

    def plan(self, work: dict[int, int]) -> StepPlan:
        """work: request -> tokens, in batch order."""
        new, rows = [], []
        for request_id, count in work.items():
            request = self.requests[request_id]
            before = request.scheduled
            after = before + count
            fresh = [self.free.pop() for _ in range(-(-after // BLOCK) - len(request.blocks))]
            request.blocks += fresh
            samples = after == request.known
            request.scheduled, request.placeholders = after, request.placeholders + samples
            if not request.resident:
                request.resident = True
                tokens = request.prompt + request.outputs
                new.append(
                    NewRequest(request_id, tokens, len(request.prompt), request.params, [list(request.blocks)], before)
                )
                fresh = []
            rows.append(ScheduledRequest(request_id, count, before, samples, [fresh] if fresh else None))
        self.num_steps += 1
        plan = StepPlan(self.num_steps, new, self.removed, rows, sum(work.values()))
        self.removed = []
        self.in_flight.append(plan)
        return plan

    def leave(self, request_id: int) -> None:
        """Preempts (or ends) a request that is not in flight."""
        request = self.requests[request_id]
        self.free += request.blocks
        request.blocks, request.scheduled, request.resident = [], 0, False
        self.removed.append(request_id)

    def finish(self) -> StepResult:
        """Runs the oldest plan and books its result."""
        plan = self.in_flight.pop(0)
        self.runner.execute(plan)
        result = self.runner.sample(plan, None)
        assert result.step_id == plan.step_id
        assert [row.request_id for row in result.rows] == [row.request_id for row in plan.scheduled]
        for row, planned in zip(result.rows, plan.scheduled, strict=True):
            request = self.requests[row.request_id]
            request.placeholders -= planned.samples
            request.outputs += row.token_ids
            request.logprobs += row.logprobs or []
            request.error = row.error or request.error
            assert len(row.token_ids) == (planned.samples and row.error is None)
            assert (row.logprobs is not None) == (bool(row.token_ids) and request.params.logprobs is not None)
            if row.prompt_logprobs is not None:
                first, entries = row.prompt_logprobs
                request.prompt_logprobs.update(zip(range(first, first + len(entries)), entries, strict=True))
        return result

    def run(self, work: dict[int, int]) -> StepResult:
        self.plan(work)
        return self.finish()


def check(request: Tracked) -> None:
    """The request's outputs equal those of the request alone."""
    tokens, entries = alone(request.prompt, request.params, len(request.outputs))
    assert request.outputs == tokens
    assert request.logprobs == (entries if request.params.logprobs is not None else [])
    if request.params.prompt_logprobs is not None:
        expected = prompt_entries(request.prompt, request.params.prompt_logprobs)
        assert request.prompt_logprobs == dict(enumerate(expected, start=1))


PROMPT = [5, 9, 200, 3, 3, 77, 140, 8, 1, 60, 61]
