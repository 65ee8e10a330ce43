"""What the largest step takes is at least what any step takes, and what is kept for sampling has its own line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hotswap.core.config import EngineConfig
from hotswap.core.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    BatchGeometry,
    CacheSpec,
    Capabilities,
    KVLayout,
    LayerCache,
)
from hotswap.core.contracts.logits_processor import BatchUpdate, LogitsProcessor, LogitsRows
from hotswap.core.contracts.model import ForwardContext, LoadReport, Model, WeightSpec
from hotswap.core.contracts.plan import NewRequest, ScheduledRequest, StepPlan
from hotswap.core.contracts.platform import MemorySnapshot
from hotswap.core.engine.worker_builder import WorkerBuilder
from hotswap.core.errors import UsageError
from hotswap.core.layers.ops import OpTable
from hotswap.core.runner.kv_cache import CachePlan, MemoryTable, allocate_cache, group_layers
from hotswap.core.runner.largest_step import LargestStep, just_below
from hotswap.core.runner.model_runner import ModelRunner, RunnerLimits
from hotswap.core.runner.processors import ActiveProcessor
from hotswap.core.runner.step_context import GroupCache
from hotswap.core.runner.transfer import Transfers
from hotswap.core.runner.trial_sampling import SamplingDemands, try_sampling
from hotswap.core.runner.warm_up import claims, doubled
from hotswap.core.sampling_params import SamplingParams
from hotswap.core.scheduling.limits import SchedulingLimits
from hotswap.core.testing.templates.platform import MyPlatform, MyPlatformOptions

ROWS, WIDTH, LENGTH, BLOCK = 24, 8_000, 64, 16
LOGITS = 4 * ROWS * WIDTH


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """A pool of threads gains nothing here, and loses a lot where other tests run beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class NoAttention(AttentionBackend):
    """Keeps what it was told."""

    layout = KVLayout("token_major", ("block", "token", "head", "dim"), ("block", "token", "head", "dim"), ())
    capabilities = Capabilities(("float32",), graph_capture="any")

    def __init__(self) -> None:
        self.told: list[BatchGeometry] = []

    def prepare(self, geometry: BatchGeometry) -> None:
        self.told.append(geometry)

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None: ...

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        assert len(query) == self.told[-1].num_tokens
        return torch.zeros_like(query)


class WideModel(Model):
    """Takes nothing but its logits. steps: the tokens of each."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def cache_specs(self) -> Sequence[CacheSpec]:
        return [CacheSpec("full", 1, 1, 1, "float32")]

    def weight_specs(self) -> Iterator[WeightSpec]:
        return iter(())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        return LoadReport()

    def embed(self, token_ids: Tensor) -> Tensor:
        return token_ids.view(-1, 1, 1).to(torch.float32)

    def forward(
        self, embeds: Tensor, positions: Tensor, context: ForwardContext, intermediates: dict[str, Tensor] | None = None
    ) -> Tensor:
        self.steps.append(len(embeds))
        return context.attend(AttentionLayer(0, 1, 1, 1, 1, 1.0), embeds, embeds, embeds).view(-1, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros((len(hidden), WIDTH))


def lean_ops(calls: set[object] | None = None) -> OpTable:
    """Ops that take next to nothing, as a card's do. calls: gets what each was asked for."""
    seen: set[object] = set() if calls is None else calls

    def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
        seen.add("argmax")
        return torch.zeros(len(logits)), torch.zeros(len(logits), dtype=torch.int64)

    def penalize(logits: Tensor, local: Tensor, rows: Tensor, divisors: Tensor, amounts: Tensor) -> None:
        seen.add("penalize")

    def draw(logits: Tensor, best: Tensor, temperature: Tensor, min_p: Tensor | None, *rest: Any) -> Tensor:
        seen.add(("draw", rest[-1]))
        return torch.zeros(len(logits), dtype=torch.int64)

    def gather(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        seen.add("gather_logprobs")
        size = (len(logits), 1 + count)
        return torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.float64), torch.ones(size).long()

    return dataclasses.replace(OpTable.reference(), argmax=argmax, penalize=penalize, draw=draw, gather_logprobs=gather)


class Copying(LogitsProcessor):
    def update_batch(self, update: BatchUpdate) -> None: ...

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        logits.mul_(1.0)


def peak_bytes(run: Callable[[], object]) -> int:
    """How much more memory than before a call takes at its highest point, by the allocator's own count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    found = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


class Served:
    """A runner whose requests all ask for the same, step by step."""

    def __init__(self, ops: OpTable, demands: SamplingDemands, named: Sequence[str] = ()) -> None:
        """named: processors that serve whoever names them, instead of one that serves all."""
        self.model, self.backend, self.ops, self.demands = WideModel(), NoAttention(), ops, demands
        groups = group_layers(self.model.cache_specs())
        self.groups = [GroupCache(groups[0], self.backend)]
        self.platform = MyPlatform(MyPlatformOptions())
        caches = allocate_cache(self.platform, groups, [self.backend.layout], CachePlan(ROWS, BLOCK, 32, "a test"))
        self.runner = ModelRunner(
            self.model,
            self.groups,
            caches,
            RunnerLimits(ROWS, LENGTH, BLOCK, WIDTH),
            ops,
            Transfers(),
            processors=[
                ActiveProcessor(name, name, Copying(), not named) for name in named or ["copying"] * demands.processors
            ],
            processed_logprobs=demands.processed_logprobs,
        )
        self.num_steps = 0
        self.last: list[int] = []

    def largest(self) -> LargestStep:
        given = (self.model, self.groups, self.ops, self.platform, Transfers())
        return LargestStep(*given, BLOCK, LENGTH, self.demands)

    def round(self, params: Sequence[SamplingParams]) -> None:
        """New requests in the place of the last ones: a prompt of two tokens, then a token each, twice."""
        ids = [1000 * (self.num_steps + 1) + at for at in range(len(params))]
        new = [
            NewRequest(request_id, [1, 2], 2, its, [[1 + at]], 0)
            for at, (request_id, its) in enumerate(zip(ids, params, strict=True))
        ]
        self._step(StepPlan(0, new, self.last, [ScheduledRequest(i, 2, 0, True) for i in ids], 2 * len(ids)))
        self.last = ids
        for before in (2, 3):
            self._step(StepPlan(0, [], [], [ScheduledRequest(i, 1, before, True) for i in ids], len(ids)))

    def rounds(self, params: Sequence[SamplingParams]) -> None:
        """Two: what the first requests keep goes while the others come."""
        self.round(params)
        self.round(params)

    def _step(self, plan: StepPlan) -> None:
        self.num_steps += 1
        plan.step_id = self.num_steps
        self.runner.execute(plan)
        self.runner.sample(plan, None)


ASKED: dict[str, list[dict[str, Any]]] = {
    "nothing": [{}],
    "filters": [{"top_p": 0.5}, {}],
    "penalties": [{"repetition_penalty": 1.2}],
    "penalties and alternatives": [{"presence_penalty": 1.0, "top_k": 5, "logprobs": 30}, {"top_p": 0.9}],
    "alternatives of some": [{"logprobs": 30}] * 3 + [{}],
    "masks": [{"allowed_token_ids": [1, 2], "logprobs": 0}],
    "forced": [{"logit_bias": {3: 100.0}, "logprobs": 0}],
    "all of it": [
        {
            "temperature": 0.7,
            "top_p": 0.5,
            "min_p": 0.1,
            "allowed_token_ids": [3, 4],
            "logit_bias": {3: 100.0, 4: 1.0},
            "bad_words_token_ids": [[1], [2, 3]],
            "frequency_penalty": 0.5,
            "min_tokens": 2,
            "stop_token_ids": [7],
            "logprobs": 30,
            "prompt_logprobs": 30,
        }
    ]
    * (ROWS - 1)
    + [{"logit_bias": {3: 1.0}}],
}


@pytest.mark.parametrize(("processed", "processors"), [(False, False), (True, False), (False, True)])
def test_no_step_takes_more_than_the_largest(
    processed: bool, processors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotswap.core.runner.processed.SORTED", 2**15)  # in proportion: 4 of 24 rows
    served = Served(lean_ops(), SamplingDemands(30, processed, processors))
    largest = peak_bytes(lambda: served.largest().run(2 * ROWS, ROWS))
    served.round([SamplingParams(repetition_penalty=1.1)] * ROWS)  # the pool is not a step's
    for name, asked in ASKED.items():
        params = [SamplingParams(**asked[at % len(asked)]) for at in range(ROWS)]
        taken = peak_bytes(partial(served.rounds, params))
        # Masks of all requests stay with them; what is a few bytes a request has no part in this.
        assert taken < largest + LOGITS // 50, (name, taken / LOGITS, largest / LOGITS)
    assert largest < (6 if processors or processed else 4) * LOGITS, "the KV cache pays for it"


def test_several_processors_of_some_rows_take_no_more() -> None:
    served = Served(lean_ops(), SamplingDemands(30, processors=True), named="abc")
    largest = peak_bytes(lambda: served.largest().run(2 * ROWS, ROWS))
    served.round([SamplingParams(repetition_penalty=1.1)] * ROWS)
    all_but_one = [
        SamplingParams(allowed_token_ids=[1, 2], logprobs=0, logits_processors={name: {} for name in "abc"})
        for _ in range(ROWS - 1)
    ]
    taken = peak_bytes(partial(served.rounds, [*all_but_one, SamplingParams(logit_bias={3: 1.0})]))
    assert taken < largest + LOGITS // 50, (taken / LOGITS, largest / LOGITS)


def test_rows_are_sorted_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For processed log-probabilities. A row that is sorted takes some fifteen times its logits: more rows do not."""
    monkeypatch.setattr("hotswap.core.runner.processed.SORTED", 2**13)
    width, demands = 2**11, SamplingDemands(20, True)

    def sampled(rows: int) -> None:
        try_sampling(torch.zeros((rows, width)), demands, lean_ops(), Transfers())

    taken = [peak_bytes(partial(sampled, rows)) for rows in (32, 64)]
    assert taken[1] - taken[0] < 4 * (32 * width * 4)


def test_every_op_of_sampling_is_called_before_serving() -> None:
    before: set[object] = set()
    served = Served(lean_ops(before), SamplingDemands(30))
    for rows in (1, 2, ROWS):
        before.clear()
        served.largest().run(2 * rows, rows)
        assert before == {"argmax", "penalize", ("draw", True), ("draw", False), "gather_logprobs"}


def test_small_steps_are_tried_where_no_graph_is() -> None:
    served = Served(lean_ops(), SamplingDemands(0))
    step, told, steps = served.largest(), served.backend.told, served.model.steps
    step.warm_up(max_tokens=600, max_rows=ROWS, graph_tokens=0)
    assert steps == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert {geometry.num_requests for geometry in told} >= {1, 2, 4, 8, 16, ROWS}
    steps.clear()
    step.warm_up(max_tokens=600, max_rows=ROWS, graph_tokens=100)
    assert steps == [128, 256, 512]
    steps.clear()
    told.clear()
    step.warm_up(max_tokens=300, max_rows=ROWS, graph_tokens=300)
    assert steps == [300], "attention that no graph was captured for"
    assert {geometry.num_requests for geometry in told} >= {1, 2, 4, 8, 16, ROWS}


def test_claims_hold_for_the_tensors_that_come_with_them() -> None:
    for num_tokens, max_rows, max_len in ((1, 4, 100), (512, 200, 5000), (7, 3, 16), (64, 1, 131072)):
        found = list(claims(num_tokens, max_rows, max_len))
        assert {claim.rows for claim in found} == set(doubled(1, min(max_rows, num_tokens)))
        for claim in found:
            each, rest = divmod(claim.tokens, claim.rows)
            assert rest == 0 and 1 <= each <= claim.max_query_len and claim.tokens <= num_tokens
            assert claim.max_seq_len <= max_len
        longest = {claim.max_seq_len for claim in found if claim.rows == 1}
        assert max(longest) == max_len and min(longest) == min(16, max_len)
    assert len(list(claims(512, 256, 131072))) < 100, "each is a launch or two"


def test_doubled() -> None:
    assert doubled(1, 1) == [1]
    assert doubled(1, 8) == [1, 2, 4, 8]
    assert doubled(1, 200) == [1, 2, 4, 8, 16, 32, 64, 128, 200]


class Card(MyPlatform):
    """Counts what is taken, as a device's allocator does."""

    is_asynchronous = True

    def peak_bytes(self, run: Callable[[], None]) -> int:
        return peak_bytes(run)

    def memory(self) -> MemorySnapshot:
        return MemorySnapshot(2**30, 2**30)

    def kv_cache_bytes(self, gpu_memory_utilization: float, step_bytes: int = 0) -> int:
        return 2**30 - step_bytes


def builder_of(
    ops: OpTable, table: MemoryTable, seconds: dict[str, float], max_model_len: int = LENGTH
) -> WorkerBuilder:
    model = WideModel()
    return WorkerBuilder(
        EngineConfig(),
        Card(MyPlatformOptions()),
        model,
        ops,
        group_layers(model.cache_specs()),
        [NoAttention()],
        SchedulingLimits(max_num_seqs=ROWS, max_num_batched_tokens=100, max_model_len=max_model_len),
        WIDTH,
        table,
        seconds,
        None,
    )


@pytest.fixture
def _host_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotswap.core.engine.worker_builder.Transfers", lambda device, platform: Transfers())


@pytest.mark.usefixtures("_host_transfers")
def test_what_sampling_keeps_has_its_line_and_is_not_the_caches() -> None:
    table, seconds = MemoryTable(), dict[str, float]()
    plan = builder_of(lean_ops(), table, seconds).plan_cache()
    parts = dict(table.rows)
    assert set(parts) == {"largest step", "sampling", "request tables"}
    assert set(seconds) == {"largest step", "warm-up"}
    assert 12 * ROWS * WIDTH <= parts["sampling"] < 12 * ROWS * WIDTH + 2**16
    assert plan.total_bytes <= 2**30 - sum(parts.values())


@pytest.mark.usefixtures("_host_transfers")
def test_tokens_of_all_seats_are_not_the_caches_either() -> None:
    """Half a GiB for 1,024 requests in a window of 131,072 tokens."""
    table, window = MemoryTable(), 20_000
    plan = builder_of(lean_ops(), table, {}, window).plan_cache()
    tokens, blocks = 4 * (ROWS + 1) * (window + 1), 4 * (ROWS + 1) * (window // BLOCK + 1)
    assert tokens + blocks <= dict(table.rows)["request tables"] < tokens + blocks + 2**16
    assert plan.total_bytes <= 2**30 - sum(dict(table.rows).values())


@pytest.mark.usefixtures("_host_transfers")
def test_where_sampling_has_no_memory_fewer_requests_are_advised() -> None:
    """Fewer tokens a step would not make it smaller."""

    def draw(*given: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    builder = builder_of(dataclasses.replace(lean_ops(), draw=draw), MemoryTable(), {})
    with pytest.raises(UsageError, match=r"in the part 'sampling'.*Lower --max-num-seqs \(now 256\)$"):
        builder.plan_cache()


@pytest.mark.parametrize(
    ("most", "tried"),
    [(8192, [8191, 4095]), (8448, [8191, 4095]), (2048, [2047, 1023]), (5, [3, 1]), (2, [1]), (1, [])],
)
def test_steps_at_which_a_kernel_that_needs_less_is_not_chosen_yet(most: int, tried: list[int]) -> None:
    assert just_below(most) == tried
