"""The device's side of an engine: how much memory a step takes, the KV cache in what is left, the worker, its graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ..config import EngineConfig
from ..contracts.attention import AttentionBackend
from ..contracts.executor import Worker
from ..contracts.model import Model
from ..contracts.platform import Platform
from ..layers.ops import OpTable
from ..runner.graphs import decode_sizes
from ..runner.kv_cache import CacheGroup, CachePlan, MemoryTable, allocate_cache, plan_cache
from ..runner.largest_step import LargestStep
from ..runner.memory_report import guard_part
from ..runner.model_runner import ModelRunner, RunnerLimits
from ..runner.processors import ActiveProcessor
from ..runner.step_context import GroupCache
from ..runner.transfer import Transfers
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

    def plan_cache(self) -> CachePlan:
        """Sizes the KV cache. Raises UsageError when not even the smallest fits."""
        cache, platform = self._config.cache, self._platform
        step_bytes = self._measure_step() if platform.is_asynchronous else 0
        measured = 0
        if cache.kv_cache_memory_bytes is None and cache.num_gpu_blocks_override is None:
            share = cache.gpu_memory_utilization
            measured = platform.kv_cache_bytes(share, step_bytes) if step_bytes else platform.kv_cache_bytes(share)
        return plan_cache(self._groups, cache, measured)

    def _measure_step(self) -> int:
        """Bytes that the largest step takes, and those of the graphs' pool."""
        started = time.monotonic()
        limits, platform = self._limits, self._platform
        sizes = {"largest step": limits.max_num_batched_tokens, "graphs": self._max_graph_tokens}
        total = 0
        with guard_part("largest step", self._memory, platform, self._config):
            step = LargestStep(
                self._model, self._served, self._ops, platform, self._transfers, self._config.cache.block_size
            )
            for part, num_tokens in sizes.items():
                if num_tokens:
                    rows = min(limits.max_num_seqs, num_tokens)
                    taken = platform.peak_bytes(lambda tokens=num_tokens, rows=rows: step.run(tokens, rows))  # type: ignore[misc]
                    self._memory.add(part, taken)
                    total += taken
        if self._max_graph_tokens:
            # Each decode graph keeps its logits, in float32, apart from what the pool shares.
            rows = sum(decode_sizes(min(limits.max_num_seqs, self._max_graph_tokens)))
            kept = 4 * rows * self._logits_width
            self._memory.add("graphs' logits", kept)
            total += kept
        self._seconds["largest step"] = time.monotonic() - started
        return total

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
            self._capture(runner)
            return runner

        return make_worker

    def _capture(self, runner: ModelRunner) -> None:
        started, report = time.monotonic(), self._report
        with guard_part("graphs", self._memory, self._platform, self._config):
            count = runner.capture_graphs(None if report is None else lambda done, total: report("graphs", done, total))
        if count:
            self._seconds["graphs"] = time.monotonic() - started
            logger.info("captured %d graphs in %.1f s", count, self._seconds["graphs"])
