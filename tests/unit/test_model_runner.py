"""The worker with a model whose output depends on every token and every block of a request's past, and on nothing
else."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
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
from hotswap.core.runner.prompt_logprobs import SLICE
from hotswap.core.runner.sampler import sample
from hotswap.core.runner.sampling_rows import build_batch, resolve_row
from hotswap.core.runner.step_context import GroupCache
from hotswap.core.runner.transfer import Transfers
from hotswap.core.sampling_params import SamplingParams

WIDTH = 211
BLOCK = 4
NUM_BLOCKS = 128
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


class Platform:
    """Its `capture` gives what a device's does, as far as a runner can tell."""

    is_asynchronous = False
    supports_graphs = True

    def __init__(self, backend: HashAttention) -> None:
        self.backend = backend

    def empty_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        return Replay(run, self.backend)

    def synchronize(self) -> None: ...


GRAPHS = False


@pytest.fixture(autouse=True, params=["eager", "graphs"])
def _every_test_with_and_without_graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "GRAPHS", request.param == "graphs")


def make_runner(max_num_seqs: int = 8, max_model_len: int = 128) -> ModelRunner:
    model, backend = HashModel(), HashAttention()
    groups = group_layers(model.cache_specs())
    caches = allocate_cache(Platform(backend), groups, [backend.layout], CachePlan(NUM_BLOCKS, BLOCK, 32, "test"))  # type: ignore[arg-type]
    limits = RunnerLimits(max_num_seqs, max_model_len, BLOCK, WIDTH, max_graph_tokens=20 if GRAPHS else 0)
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
        platform=Platform(backend),  # type: ignore[arg-type]
    )
    assert (runner.capture_graphs() > 0) == GRAPHS
    return runner


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


@pytest.mark.parametrize("chunks", [[11], [1] * 11, [4, 4, 3], [3, 7, 1], [5, 5, 1]])
def test_a_prompt_in_any_chunks_gives_the_same_tokens_and_logprobs(chunks: list[int]) -> None:
    driver = Driver(make_runner())
    request = driver.add(1, PROMPT, temperature=0.0, logprobs=2, prompt_logprobs=1)
    for chunk in chunks:
        assert request.outputs == []
        driver.run({1: chunk})
    for _ in range(9):
        driver.run({1: 1})
    assert len(request.outputs) == 10
    check(request)


def test_F02_partial_prefills_in_one_batch_emit_nothing_early_and_one_may_leave() -> None:
    driver = Driver(make_runner())
    a = driver.add(1, PROMPT[:3], temperature=0.0, logprobs=1)
    b = driver.add(2, PROMPT * 2, temperature=0.0, logprobs=1)
    c = driver.add(3, PROMPT[:7], temperature=0.0, logprobs=1)
    driver.run({1: 3, 2: 3, 3: 2})
    driver.run({3: 4, 1: 1, 2: 3})
    assert (len(a.outputs), b.outputs, c.outputs) == (2, [], [])
    driver.leave(2)
    driver.run({3: 1, 1: 1})
    driver.run({1: 1, 3: 1})
    for request in (a, c):
        check(request)
    assert (len(a.outputs), len(c.outputs)) == (4, 2)


def test_F01_mixed_logprobs_go_to_their_own_rows() -> None:
    driver = Driver(make_runner())
    wanted: list[dict[str, Any]] = [{}, {"logprobs": 2}, {}, {"logprobs": 0, "prompt_logprobs": 3}]
    prompts = [PROMPT[:6], PROMPT, PROMPT[2:9], PROMPT[:1]]
    requests = [driver.add(i, p, temperature=0.0, **w) for i, (p, w) in enumerate(zip(prompts, wanted, strict=True))]
    driver.run({0: 6, 1: 5, 2: 7, 3: 1})
    driver.run({1: 6, 0: 1, 3: 1})
    driver.run({3: 1, 2: 1, 1: 1})
    for request in requests:
        check(request)


def test_two_steps_in_flight_feed_on_tokens_that_the_host_has_not_seen() -> None:
    driver = Driver(make_runner())
    requests = [driver.add(i, PROMPT[i:], temperature=0.8, seed=i, logprobs=1) for i in range(3)]
    driver.plan({0: 11, 1: 10, 2: 4})
    driver.plan({0: 1, 1: 1, 2: 5})  # made before the first result is known
    for _ in range(12):
        driver.finish()
        driver.plan(dict.fromkeys(range(3), 1))
    while driver.in_flight:
        driver.finish()
    for request in requests:
        assert len(request.outputs) >= 13
        check(request)


def test_preempted_requests_come_back_with_their_outputs_and_other_blocks() -> None:
    driver = Driver(make_runner())
    common: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.9}
    a = driver.add(1, PROMPT, seed=4, prompt_logprobs=0, **common)
    b = driver.add(2, PROMPT[:5], seed=5, **common)
    driver.run({1: 11, 2: 5})
    driver.run({1: 1, 2: 1})
    driver.leave(1)
    driver.run({2: 1})
    driver.run({1: 6, 2: 1})  # back, its recomputation in chunks
    driver.run({2: 1, 1: 7})
    driver.run({1: 1, 2: 1})
    assert (len(a.outputs), len(b.outputs)) == (4, 6)
    check(a)
    check(b)


def test_requests_that_come_back_in_each_others_slots_keep_their_own_tokens() -> None:
    driver = Driver(make_runner(max_num_seqs=2))
    a = driver.add(1, PROMPT, temperature=1.0, seed=4, presence_penalty=0.5)
    b = driver.add(2, PROMPT[:5], temperature=1.0, seed=5, presence_penalty=0.5)
    driver.run({1: 11, 2: 5})
    driver.leave(1)
    driver.leave(2)
    driver.run({1: 12, 2: 6})  # the seat freed last is taken first
    for _ in range(3):
        driver.run({1: 1, 2: 1})
    check(a)
    check(b)
    assert len(driver.runner._pool) == 2
    driver.leave(1)
    driver.leave(2)
    driver.add(3, PROMPT[:2], temperature=0.0)
    driver.run({3: 2})
    assert len(driver.runner._pool) == 0


def test_E01_preemption_within_a_prompt_neither_loses_nor_repeats_prompt_logprobs() -> None:
    driver = Driver(make_runner())
    request = driver.add(1, PROMPT * 3, temperature=0.0, prompt_logprobs=1)
    for _ in range(3):
        driver.run({1: 8})
    driver.leave(1)
    driver.run({1: 20})
    driver.run({1: 13})
    check(request)


def test_removed_and_new_in_one_plan_share_the_last_seat() -> None:
    driver = Driver(make_runner(max_num_seqs=1))
    driver.add(1, PROMPT, temperature=0.0)
    driver.run({1: 11})
    driver.leave(1)
    request = driver.add(2, PROMPT[:4], temperature=0.0)
    driver.run({2: 4})
    check(request)


def test_scoring_gives_prompt_logprobs_without_drawing() -> None:
    long = [(i * 37 + 5) % WIDTH for i in range(SLICE + 20)]
    long = [token if token != POISON else 14 for token in long]
    driver = Driver(make_runner())
    request = driver.add(1, long, temperature=0.0, prompt_logprobs=2)
    plan = driver.plan({1: len(long)})
    plan.scheduled[0].samples, request.placeholders = False, 0
    result = driver.finish()
    assert result.rows[0].token_ids == []
    assert request.prompt_logprobs == dict(enumerate(prompt_entries(long, 2), start=1))


def test_a_prompt_of_one_token_has_no_prompt_logprobs() -> None:
    driver = Driver(make_runner())
    driver.add(1, [5], temperature=0.0, prompt_logprobs=2)
    assert driver.run({1: 1}).rows[0].prompt_logprobs is None


def test_P3_a_request_of_nan_ends_alone() -> None:
    def outputs(poisoned: bool) -> list[Tracked]:
        driver = Driver(make_runner())
        driver.add(1, PROMPT, temperature=0.7, seed=1, logprobs=2, min_p=0.1)
        driver.add(
            2, [4, POISON if poisoned else 6, 7], temperature=0.9, seed=2, top_p=0.9, logprobs=1, prompt_logprobs=1
        )
        driver.add(3, PROMPT[:4], temperature=0.0, presence_penalty=1.0)
        driver.run({1: 11, 2: 3, 3: 4})
        for _ in range(5):
            if driver.requests[2].error is None:
                driver.run({1: 1, 2: 1, 3: 1})
            else:
                driver.run({1: 1, 3: 1})
        return list(driver.requests.values())

    clean, dirty = outputs(False), outputs(True)
    assert dirty[1].error == "the model's logits are not finite (NaN or infinity)"
    assert (dirty[1].outputs, dirty[1].prompt_logprobs) == ([], {})
    for i in (0, 2):
        assert dirty[i].error is None
        assert (dirty[i].outputs, dirty[i].logprobs) == (clean[i].outputs, clean[i].logprobs)
        check(dirty[i])


def test_a_faulty_request_that_is_still_in_flight_harms_nobody() -> None:
    driver = Driver(make_runner())
    driver.add(1, [POISON], temperature=0.0)
    other = driver.add(2, PROMPT, temperature=0.0)
    driver.plan({1: 1, 2: 11})
    driver.plan({1: 1, 2: 1})
    driver.finish()
    driver.finish()
    assert driver.requests[1].error is not None
    check(other)


def test_block_copies_come_before_the_forward_and_before_later_writes() -> None:
    driver = Driver(make_runner())
    first = driver.add(1, PROMPT[:6], temperature=0.0)
    driver.run({1: 6})
    # Request 2 starts with the same six tokens: it shares block 0 and copies block 1, which it then writes to.
    second = driver.add(2, [*PROMPT[:6], 50, 51], temperature=0.0)
    copied = driver.free.pop()
    second.blocks, second.scheduled = [first.blocks[0], copied], 6
    plan = driver.plan({1: 1, 2: 2})
    plan.block_copies = [(0, first.blocks[1], copied)]
    driver.finish()
    check(first)
    assert second.outputs == alone(second.prompt, second.params, 1)[0]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 2])
def test_any_schedule_gives_every_request_what_it_gets_alone(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    driver = Driver(make_runner(max_num_seqs=5))
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.8, "logprobs": 1},
        {"temperature": 1.2, "top_k": 9, "frequency_penalty": 0.6},
        {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.2, "logprobs": 0},
        {"temperature": 0.0, "prompt_logprobs": 1, "eos_token_ids": [5, 6], "min_tokens": 3},
        {"temperature": 1.0, "bad_words_token_ids": [[7], [8, 9]], "logit_bias": {3: 4.0}},
    ]
    for i in range(9):
        prompt = [t if (t := rng.randrange(WIDTH)) != POISON else 14 for _ in range(rng.randint(1, 24))]
        driver.add(i, prompt, seed=i, **rng.choice(choices))
    for _ in range(45):
        flying = {row.request_id for plan in driver.in_flight for row in plan.scheduled}
        resident = [i for i, r in driver.requests.items() if r.resident]
        if resident and rng.random() < 0.15 and (victim := rng.choice(resident)) not in flying:
            driver.leave(victim)
            resident.remove(victim)
        waiting = [i for i in driver.requests if not driver.requests[i].resident]
        rng.shuffle(waiting)
        batch = [i for i in resident if rng.random() < 0.9] + waiting[: max(0, 5 - len(resident))]
        work = {i: rng.randint(1, min(driver.wanted(i), 9)) for i in batch if driver.wanted(i) > 0}
        if work:
            driver.plan(work)
        while driver.in_flight and len(driver.in_flight) >= depth:
            driver.finish()
    while driver.in_flight:
        driver.finish()
    assert sum(len(request.outputs) for request in driver.requests.values()) > 60
    for request in driver.requests.values():
        tokens, entries = alone(request.prompt, request.params, len(request.outputs))
        assert request.outputs == tokens
        assert request.logprobs == (entries if request.params.logprobs is not None else [])
        if request.params.prompt_logprobs is not None and request.outputs:
            assert request.prompt_logprobs == dict(enumerate(prompt_entries(request.prompt, 1), start=1))


def test_masks_reach_the_requests_that_they_are_for() -> None:
    driver = Driver(make_runner())
    driver.add(1, PROMPT, temperature=0.0)
    driver.add(2, PROMPT, temperature=0.0)
    mask = torch.zeros(WIDTH, dtype=torch.bool)
    mask[44] = True
    plan = driver.plan({1: 11, 2: 11})
    driver.runner.execute(plan)
    rows = driver.runner.sample(plan, {2: mask}).rows
    assert rows[1].token_ids == [44] != rows[0].token_ids


def test_steps_out_of_order_are_refused() -> None:
    driver = Driver(make_runner())
    driver.add(1, PROMPT, temperature=0.0)
    first = driver.plan({1: 11})
    with pytest.raises(RuntimeError, match="was not executed last"):
        driver.runner.sample(first, None)
    driver.runner.execute(first)
    with pytest.raises(RuntimeError, match="has not been sampled"):
        driver.runner.execute(driver.plan({1: 1}))


def test_collective_methods() -> None:
    driver = Driver(make_runner(max_num_seqs=1))
    driver.add(1, PROMPT, temperature=0.0, presence_penalty=1.0)
    driver.run({1: 11})
    assert driver.runner.collective("memory") == ["weights     1.000 GiB", "total       1.000 GiB"]
    driver.runner.collective("reset")
    request = driver.add(2, PROMPT[:3], temperature=0.0, presence_penalty=1.0)
    driver.run({2: 3})
    check(request)
    with pytest.raises(ValueError, match="known: memory, reset"):
        driver.runner.collective("fly")
