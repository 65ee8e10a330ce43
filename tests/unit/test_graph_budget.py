"""What the KV cache leaves for graphs: both ladders' largest steps, results that are not lent, and nothing where none are
captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hash_worker import BLOCK, WIDTH, HashAttention, HashModel
from torch import Tensor

from hotswap.core.config import EngineConfig
from hotswap.core.contracts.attention import Capabilities
from hotswap.core.contracts.platform import MemorySnapshot
from hotswap.core.engine.worker_builder import WorkerBuilder
from hotswap.core.layers.ops import OpTable
from hotswap.core.runner.graphs import kept_bytes
from hotswap.core.runner.kv_cache import MemoryTable, group_layers
from hotswap.core.runner.largest_step import just_below
from hotswap.core.runner.transfer import Transfers
from hotswap.core.scheduling.limits import SchedulingLimits
from hotswap.core.testing.templates.platform import MyPlatform, MyPlatformOptions

ROWS, TOKENS, GRAPH_TOKENS = 6, 40, 16
TAKEN = 1000  # what the card says that anything takes


class Card(MyPlatform):
    """steps: tokens and rows of logits of whatever was measured."""

    is_asynchronous = True
    supports_graphs = True

    def __init__(self, model: CountingModel, *, lends: bool) -> None:
        super().__init__(MyPlatformOptions())
        self.lends_graph_results = lends
        self.model = model
        self.steps: list[tuple[int, int]] = []

    def peak_bytes(self, run: Callable[[], None]) -> int:
        self.model.last = (0, 0)
        run()
        self.steps.append(self.model.last)
        return TAKEN

    def memory(self) -> MemorySnapshot:
        return MemorySnapshot(2**20, 2**20)

    def kv_cache_bytes(self, gpu_memory_utilization: float, step_bytes: int = 0) -> int:
        return 2**20 - step_bytes


class CountingModel(HashModel):
    """last: the most tokens, and rows of logits, since it was set. sizes: tokens of each step."""

    last = (0, 0)

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def embed(self, token_ids: Tensor) -> Tensor:
        self.last = (max(self.last[0], len(token_ids)), self.last[1])
        self.sizes.append(len(token_ids))
        return super().embed(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        self.last = (self.last[0], max(self.last[1], len(hidden)))
        return super().logits(hidden)


class LooksAtValues(CountingModel):
    supports_graphs = False


def measured(
    monkeypatch: pytest.MonkeyPatch,
    model: CountingModel,
    *,
    lends: bool = True,
    attention: str = "any",
    eager: bool = False,
) -> tuple[dict[str, int], Card]:
    """Lines of the memory table, and the card, after the cache was planned; its size is checked."""
    monkeypatch.setattr("hotswap.core.engine.worker_builder.Transfers", lambda device, platform: Transfers())
    monkeypatch.setattr(HashAttention, "capabilities", Capabilities(("float32",), graph_capture=attention))  # type: ignore[arg-type]
    card, table = Card(model, lends=lends), MemoryTable()
    builder = WorkerBuilder(
        EngineConfig.from_flat(block_size=BLOCK, max_graph_tokens=GRAPH_TOKENS, enforce_eager=eager),
        card,
        model,
        OpTable.reference(),
        group_layers(model.cache_specs()),
        [HashAttention()],
        SchedulingLimits(max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, max_model_len=64),
        WIDTH,
        table,
        {},
        None,
    )
    plan = builder.plan_cache()
    parts = dict(table.rows)
    assert plan.total_bytes <= 2**20 - sum(parts.values()) < plan.total_bytes + plan.block_bytes
    return parts, card


def test_both_ladders_count(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, card = measured(monkeypatch, CountingModel())
    graphs = {part: taken for part, taken in parts.items() if "graphs" in part}
    assert graphs == {"decode graphs": TAKEN, "forward graphs": TAKEN}
    assert (ROWS, ROWS) in card.steps and (GRAPH_TOKENS, ROWS) in card.steps
    assert {*just_below(GRAPH_TOKENS), *just_below(TOKENS)} <= set(card.model.sizes)


def test_results_count_where_each_graph_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, _ = measured(monkeypatch, CountingModel(), lends=False)
    assert parts["graphs' results"] == kept_bytes(ROWS, GRAPH_TOKENS, ROWS, 4 * WIDTH, 4)
    assert kept_bytes(256, 2048, 256, 4 * 128_000, 8192) > 2 * 2**30  # what lending is for


def test_attention_that_can_only_decode_has_no_forward_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, _ = measured(monkeypatch, CountingModel(), lends=False, attention="uniform_decode")
    assert "decode graphs" in parts and "forward graphs" not in parts
    assert parts["graphs' results"] == kept_bytes(ROWS, 0, ROWS, 4 * WIDTH, 4)


@pytest.mark.parametrize(
    ("model", "attention", "eager"),
    [(LooksAtValues(), "any", False), (CountingModel(), "none", False), (CountingModel(), "any", True)],
    ids=["model", "attention", "eager"],
)
def test_nothing_is_kept_where_none_are_captured(
    model: CountingModel, attention: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, _ = measured(monkeypatch, model, lends=False, attention=attention, eager=eager)
    assert set(parts) == {"largest step", "sampling", "request tables"}


def test_each_graph_keeps_its_own() -> None:
    assert kept_bytes(1, 0, 1, 100, 0) == 100
    assert kept_bytes(2, 0, 2, 100, 10) == 3 * 110
    assert kept_bytes(2, 16, 2, 100, 10) == 3 * 110 + 2 * 10
