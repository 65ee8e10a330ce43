"""The device's side of an engine: how much memory a step takes, the KV cache in what is left, the worker, its graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from ..config import EngineConfig
from ..contracts.attention import AttentionBackend
from ..contracts.executor import Worker
from ..contracts.model import Model
from ..contracts.platform import Platform
from ..layers.ops import OpTable
from ..runner.graphs import kept_bytes, unsupported
from ..runner.input_batch import InputBatch
from ..runner.kv_cache import GIB, CacheGroup, CachePlan, MemoryTable, allocate_cache, plan_cache
from ..runner.largest_step import LargestStep, just_below
from ..runner.memory_report import guard_part
from ..runner.model_runner import ModelRunner, RunnerLimits
from ..runner.penalties import PenaltyPool
from ..runner.processors import ActiveProcessor
from ..runner.step_context import GroupCache
from ..runner.transfer import Transfers
from ..runner.trial_sampling import SamplingDemands
from ..scheduling.limits import SchedulingLimits

logger = logging.getLogger("hotswap.engine")

Report = Callable[[str, int, int], None]


class WorkerBuilder:
    """Used once, in this order: `plan_cache`, `worker`. seconds: where start-up time went, by part."""

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        model: Model,
        ops: OpTable,
        groups: Sequence[CacheGroup],
        backends: Sequence[AttentionBackend],
        limits: SchedulingLimits,
        logits_width: int,
        memory: MemoryTable,
        seconds: dict[str, float],
        report: Report | None,
    ) -> None:
        self._config = config
        self._platform = platform
        self._model = model
        self._ops = ops
        self._groups = groups
        self._served = [GroupCache(group, backend) for group, backend in zip(groups, backends, strict=True)]
        self._limits = limits
        self._logits_width = logits_width
        self._memory = memory
        self._seconds = seconds
        self._report = report
        self._transfers = Transfers(platform.torch_device(), platform)
        self._max_graph_tokens = 0
        if platform.supports_graphs and not config.enforce_eager:
            self._max_graph_tokens = min(config.max_graph_tokens, limits.max_num_batched_tokens)

    def plan_cache(self, *, processes_logits: bool = False) -> CachePlan:
        """Sizes the KV cache. processes_logits: whether there are logits processors. Raises UsageError when not even the
        smallest fits."""
        cache, platform = self._config.cache, self._platform
        step_bytes = self._measure_step(processes_logits) if platform.is_asynchronous else 0
        measured = 0
        if cache.kv_cache_memory_bytes is None and cache.num_gpu_blocks_override is None:
            share = cache.gpu_memory_utilization
            measured = platform.kv_cache_bytes(share, step_bytes) if step_bytes else platform.kv_cache_bytes(share)
        return plan_cache(self._groups, cache, measured)

    def _measure_step(self, processes_logits: bool) -> int:
        """Bytes that the largest step takes, the graphs' pool, and what the worker keeps of requests. Then runs what serving
        would otherwise be the first to run."""
        started = time.monotonic()
        config, limits, graph_tokens = self._config, self._limits, self._graph_tokens()
        max_rows, max_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        sampling = partial(guard_part, "sampling", self._memory, self._platform, config)
        with guard_part("largest step", self._memory, self._platform, config):
            step = self._trial_step(processes_logits)
            total = self._measured("largest step", partial(self._run_largest, step, sampling))
            if graph_tokens:
                total += self._measure_graphs(step, graph_tokens)
        with sampling():
            total += self._measured("sampling", lambda: PenaltyPool(self._logits_width, self._transfers, max_rows))
        with guard_part("request tables", self._memory, self._platform, config):
            total += self._measured("request tables", self._request_tables)
        self._seconds["largest step"] = time.monotonic() - started
        started = time.monotonic()
        with guard_part("largest step", self._memory, self._platform, config):
            step.warm_up(max_tokens, max_rows, graph_tokens if self._captures_all() else 0)
            self._platform.synchronize()
        self._seconds["warm-up"] = time.monotonic() - started
        return total

    def _run_largest(self, step: LargestStep, around_sampling: Callable[[], AbstractContextManager[object]]) -> None:
        max_rows, max_tokens = self._limits.max_num_seqs, self._limits.max_num_batched_tokens
        step.run(max_tokens, min(max_rows, max_tokens), around_sampling)
        for tokens in just_below(max_tokens):
            step.decode(tokens, min(max_rows, tokens))

    def _graph_tokens(self) -> int:
        """Of the largest step that will be replayed; 0: none is."""
        reason = unsupported(self._model, [served.backend for served in self._served])
        return self._max_graph_tokens if reason is None else 0

    def _measure_graphs(self, step: LargestStep, graph_tokens: int) -> int:
        """Bytes of the graphs' pool. Both families count: memory that the pool took for the tensors of one may be in too small
        pieces for the other's logits."""
        max_rows, captures_all = self._limits.max_num_seqs, self._captures_all()
        rows = min(max_rows, graph_tokens)
        total = self._measured("decode graphs", lambda: step.decode(rows, rows))
        if captures_all:

            def forward() -> None:
                for tokens in (graph_tokens, *just_below(graph_tokens)):
                    step.decode(tokens, min(max_rows, tokens))

            total += self._measured("forward graphs", forward)
        if not self._platform.lends_graph_results:
            embeds = self._model.embed(self._transfers.upload([0], torch.int64))
            token_bytes = embeds.shape[1] * embeds.element_size()  # a hidden state's, too
            tokens = graph_tokens if captures_all else 0
            kept = kept_bytes(rows, tokens, max_rows, 4 * self._logits_width, token_bytes)
            self._memory.plan("graphs' results", kept)
            total += kept
        return total

    def _captures_all(self) -> bool:
        """Whether every step of few tokens is to be replayed, not only those that decode."""
        return all(served.backend.capabilities.graph_capture == "any" for served in self._served)

    def _trial_step(self, processes_logits: bool) -> LargestStep:
        config = self._config
        demands = SamplingDemands(
            max_logprobs=min(config.max_logprobs, self._logits_width),
            processed_logprobs=config.logprobs_mode == "processed_logprobs",
            processors=processes_logits,
        )
        block_size, max_model_len = config.cache.block_size, self._limits.max_model_len
        given = (self._model, self._served, self._ops, self._platform, self._transfers)
        return LargestStep(*given, block_size, max_model_len, demands)

    def _measured(self, part: str, run: Callable[[], object]) -> int:
        """The bytes that `run` takes at its highest point; what it returns is dropped."""

        def dropped() -> None:
            run()

        taken = self._platform.peak_bytes(dropped)
        self._memory.plan(part, taken)
        return taken

    def _request_tables(self) -> InputBatch:
        """As the worker's."""
        limits, block_size = self._limits, self._config.cache.block_size
        sizes = (limits.max_num_seqs, limits.max_model_len, block_size, len(self._groups))
        return InputBatch(*sizes, self._ops, self._transfers)

    def worker(self, plan: CachePlan, processors: Sequence[ActiveProcessor]) -> Callable[[], Worker]:
        """Allocates the KV cache; what is returned makes the worker on the thread that calls it."""
        started = time.monotonic()
        with guard_part("KV cache", self._memory, self._platform, self._config, plan.total_bytes):
            layouts = [served.backend.layout for served in self._served]
            caches = allocate_cache(self._platform, self._groups, layouts, plan)
        self._memory.add("KV cache", plan.total_bytes)
        self._seconds["KV cache"] = time.monotonic() - started
        limits = RunnerLimits(
            max_num_seqs=self._limits.max_num_seqs,
            max_model_len=self._limits.max_model_len,
            block_size=plan.block_size,
            logits_width=self._logits_width,
            max_graph_tokens=self._max_graph_tokens,
        )

        def make_worker() -> Worker:
            self._platform.enter_thread()
            with guard_part("request tables", self._memory, self._platform, self._config):
                runner = ModelRunner(
                    self._model,
                    self._served,
                    caches,
                    limits,
                    self._ops,
                    self._transfers,
                    memory=self._memory,
                    platform=self._platform,
                    processors=processors,
                    poison=self._config.cache.debug_poison_freed_blocks,
                    processed_logprobs=self._config.logprobs_mode == "processed_logprobs",
                )
            for part in ("sampling", "request tables"):
                self._memory.take(part)
            self._capture(runner)
            return runner

        return make_worker

    def _capture(self, runner: ModelRunner) -> None:
        started, report, before = time.monotonic(), self._report, self._platform.memory().available_bytes
        with guard_part("graphs", self._memory, self._platform, self._config):
            count = runner.capture_graphs(None if report is None else lambda done, total: report("graphs", done, total))
        if count:
            self._seconds["graphs"] = time.monotonic() - started
            taken = max(0, before - self._platform.memory().available_bytes)
            logger.info("captured %d graphs in %.1f s, %.2f GiB", count, self._seconds["graphs"], taken / GIB)
