"""Prometheus metrics: requests and tokens counted from what was delivered, the engine's numbers read at scrape.

Rules: `prompt_tokens` counts a prompt once, however many choices it has; `generation_tokens` and `request_success`
count every choice. A choice whose client left counts as finished_reason="abort", one that failed as "error". So the sum
of all calls' `usage` equals the token counters, except for calls whose client left before the answer.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hotswap.core.engine.wire import EngineStats, HistogramData
from hotswap.core.errors import EngineDeadError, RequestError
from hotswap.core.outputs import RequestOutput

from .engine_surface import ServedEngine
from .state import ServerState

logger = logging.getLogger("hotswap.server")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_INDEX = "0"  # of the only replica
FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = frozenset({"queue_full", "context_length_exceeded", "starting", "draining", "engine_dead"})

_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOKEN_TIME = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class ServerMetrics:
    """One registry per server. Label values come from the configuration and from fixed lists: their number is
    bounded."""

    def __init__(self, state: ServerState) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._namespace = state.config.metrics_namespace
        self._labels = (state.model_names[0], ENGINE_INDEX)
        self.registry = CollectorRegistry()
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens that the prefix cache held")
        self.generation_tokens = self._counter("generation_tokens", "Tokens delivered")
        success = self._labelled(Counter, "request_success", "Choices that ended, by reason", ("finished_reason",))
        self._finished = {r: success.labels(*self._labels, r) for r in FINISH_REASONS}
        self._rejections = self._labelled(Counter, "admission_rejections", "Requests refused at admission", ("reason",))
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Between two tokens", _TOKEN_TIME)
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds", "Mean time between a choice's tokens", _TOKEN_TIME
        )
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Arrival to last token of a choice", _LATENCY)
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Arrival to first scheduled, a choice", _LATENCY
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "First scheduled to first token, a choice", _LATENCY
        )
        self.decode_time = self._histogram("request_decode_time_seconds", "First to last token of a choice", _LATENCY)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens per prompt", _TOKENS)
        self.request_generation_tokens = self._histogram("request_generation_tokens", "Tokens per choice", _TOKENS)
        self.registry.register(_EngineCollector(state, self._namespace, self._labels))

    def _labelled(self, kind: type[Any], name: str, text: str, extra: tuple[str, ...] = (), **options: Any) -> Any:
        return kind(
            f"{self._namespace}:{name}", text, ("model_name", "engine", *extra), registry=self.registry, **options
        )

    def _counter(self, name: str, text: str) -> Counter:
        counter: Counter = self._labelled(Counter, name, text).labels(*self._labels)
        return counter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram: Histogram = self._labelled(Histogram, name, text, buckets=buckets).labels(*self._labels)
        return histogram

    def on_finished(self, reason: str) -> None:
        self._finished.get(reason, self._finished["error"]).inc()

    def on_refused(self, error: Exception) -> None:
        """Counts refusals for load, size and state of the server; malformed requests are not admissions."""
        if isinstance(error, EngineDeadError):
            reason = "engine_dead"
        elif not isinstance(error, RequestError):
            return
        elif error.status in (429, 503) or error.code == "context_length_exceeded":
            reason = error.code if error.code in REJECTIONS else "queue_full" if error.status == 429 else "other"
        else:
            return
        self._rejections.labels(*self._labels, reason).inc()

    def expose(self) -> bytes:
        return generate_latest(self.registry)


class PromptMetrics:
    """Follows one prompt of a call from its deltas. `close` must be called once the engine has admitted it, however it
    ends.

    started: whether anything was delivered.
    """

    def __init__(self, metrics: ServerMetrics, num_choices: int) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._open = set(range(num_choices))
        self.started = False

    def observe(self, output: RequestOutput) -> None:
        """Counts a delta that is about to be delivered. Raises nothing."""
        first, self.started = not self.started, True
        with _harmless():
            self._observe(output, first)

    def _observe(self, output: RequestOutput, first: bool) -> None:
        now = time.monotonic()
        metrics = self._metrics
        if first:
            metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            metrics.prompt_tokens_cached.inc(output.num_cached_tokens)
            metrics.request_prompt_tokens.observe(len(output.prompt_token_ids))
        for seconds in output.queue_seconds:
            metrics.queue_time.observe(seconds)
        for seconds in output.prefill_seconds:
            metrics.prefill_time.observe(seconds)
        for choice in output.outputs:
            count = len(choice.token_ids)
            if count:
                self._count_tokens(choice.index, count, now)
            if choice.finish_reason is not None:
                self._finish(choice.index, choice.finish_reason, now)

    def _count_tokens(self, index: int, count: int, now: float) -> None:
        metrics = self._metrics
        metrics.generation_tokens.inc(count)
        self._tokens[index] = self._tokens.get(index, 0) + count
        if index not in self._first:
            self._first[index] = now
            metrics.time_to_first_token.observe(now - self._start)
        else:
            # Tokens that were merged into one delta share its time.
            gap = (now - self._last[index]) / count
            for _ in range(count):
                metrics.inter_token_latency.observe(gap)
        self._last[index] = now

    def _finish(self, index: int, reason: str, now: float) -> None:
        if index not in self._open:
            return
        self._open.discard(index)
        metrics = self._metrics
        metrics.on_finished(reason)
        tokens = self._tokens.get(index, 0)
        metrics.request_generation_tokens.observe(tokens)
        metrics.e2e_latency.observe(now - self._start)
        if tokens:
            decode = now - self._first[index]
            metrics.decode_time.observe(decode)
            if tokens > 1:
                metrics.time_per_output_token.observe(decode / (tokens - 1))

    def close(self, reason: str) -> None:
        """Ends the choices that are still open: their client left ("abort") or they failed ("error"). Raises nothing."""
        now = time.monotonic()
        with _harmless():
            for index in sorted(self._open):
                self._finish(index, reason, now)


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """Counting must never end what is counted (bugbank O02): whatever it raises is logged, and the request goes on."""
    try:
        yield
    except Exception:
        logger.exception("a request was not counted")


class _EngineCollector(Collector):
    """The engine's latest numbers, read when somebody asks."""

    def __init__(self, state: ServerState, namespace: str, labels: tuple[str, str]) -> None:
        self._state = state
        self._namespace = namespace
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        engine = self._state.engine
        if engine is None or engine.state == "starting":
            return
        stats = engine.stats
        yield self._gauge("num_requests_running", "Requests in the batch", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a place", stats.num_waiting)
        yield self._gauge("num_requests_swapped", "Preempted requests whose KV is in host memory", stats.num_swapped)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", stats.kv_usage)
        yield self._gauge("gpu_cache_usage_perc", "Same as kv_cache_usage_perc", stats.kv_usage)
        yield self._gauge("kv_waste_perc", "Share of allocated KV slots without a token, 0 to 1", stats.kv_waste)
        yield self._gauge("host_cache_usage_perc", "Share of the host tier in use, 0 to 1", stats.host_cache_usage)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits)
        preemptions = CounterMetricFamily(
            f"{self._namespace}:num_preemptions",
            "Requests that yielded their KV",
            labels=("model_name", "engine", "mode"),
        )
        preemptions.add_metric((*self._labels, "recompute"), stats.num_preemptions_recompute)
        preemptions.add_metric((*self._labels, "swap"), stats.num_preemptions_swap)
        yield preemptions
        yield self._counter("observer_faults", "Observer callbacks that raised", stats.num_observer_faults)
        yield from self._drafts(stats)
        yield from self._steps(stats)
        yield from self._facts(engine)

    def _drafts(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter("spec_decode_num_drafts", "Times that a drafter proposed tokens", stats.num_drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens proposed", stats.num_draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Of these, tokens accepted", stats.num_accepted_tokens)
        accepted = CounterMetricFamily(
            f"{self._namespace}:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place in the draft",
            labels=("model_name", "engine", "position"),
        )
        for position, count in enumerate(stats.num_accepted_per_pos):
            accepted.add_metric((*self._labels, str(position)), count)
        yield accepted

    def _steps(self, stats: EngineStats) -> Iterator[Metric]:
        tokens = HistogramMetricFamily(
            f"{self._namespace}:iteration_tokens_total", "Tokens computed in a step", labels=("model_name", "engine")
        )
        _add_histogram(tokens, self._labels, stats.step_tokens)
        yield tokens
        seconds = HistogramMetricFamily(
            f"{self._namespace}:step_seconds", "Parts of a step", labels=("model_name", "engine", "phase")
        )
        phases = {"schedule": stats.schedule_times, "execute": stats.execute_times, "update": stats.update_times}
        for phase, data in phases.items():
            _add_histogram(seconds, (*self._labels, phase), data)
        yield seconds

    def _facts(self, engine: ServedEngine) -> Iterator[Metric]:
        info = engine.info
        yield self._info(
            "cache_config_info",
            "The KV cache, as label values",
            [{"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks), "dtype": info.dtype}],
        )
        rows = [
            {key: str(row.get(key, "")) for key in ("kind", "name", "distribution", "version")}
            for row in info.inventory
            if row.get("state") == "active"
        ]
        if rows:
            yield self._info("plugin_info", "The plugins at work, as label values", rows)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._namespace}:{name}", text, labels=("model_name", "engine"))
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._namespace}:{name}", text, labels=("model_name", "engine"))
        family.add_metric(self._labels, value)
        return family

    def _info(self, name: str, text: str, rows: list[dict[str, str]]) -> Metric:
        family = GaugeMetricFamily(f"{self._namespace}:{name}", text, labels=("model_name", "engine", *rows[0]))
        for row in rows:
            family.add_metric((*self._labels, *row.values()), 1)
        return family


def _add_histogram(family: HistogramMetricFamily, labels: tuple[str, ...], data: HistogramData) -> None:
    """Prometheus' buckets are cumulative, ours are not."""
    bounds = [*(str(float(bound)) for bound in data.bounds), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(data.counts), strict=True))
    family.add_metric(labels, buckets, data.sum)
