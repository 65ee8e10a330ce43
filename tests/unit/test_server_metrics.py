"""Metrics tell the truth, and their series are bounded."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hotswap.core.errors import UsageError
from hotswap.core.outputs import RequestOutput
from hotswap.core.testing.fake_engine import FakeEngine


def test_counters_equal_usage(api: Any, sse: Callable[[Any], Any]) -> None:
    usages = [
        api.complete(["abc", "de"], n=2).json()["usage"],
        api.chat("hello", max_tokens=3).json()["usage"],
        sse(api.chat("hello", stream=True, stop="e", stream_options={"include_usage": True}))[-1]["usage"],
    ]
    for name, key in (("prompt_tokens_total", "prompt_tokens"), ("generation_tokens_total", "completion_tokens")):
        assert api.metric(name) == sum(usage[key] for usage in usages)
    assert api.metric("prompt_tokens_cached_total") == sum(
        usage["prompt_tokens_details"]["cached_tokens"] for usage in usages
    )
    assert api.metric("request_success_total", finished_reason="stop") == 5
    assert api.metric("request_success_total", finished_reason="length") == 1
    assert api.metric("request_generation_tokens_sum") == api.metric("generation_tokens_total")
    assert api.metric("request_generation_tokens_count") == 6
    assert api.metric("request_prompt_tokens_count") == 4
    assert api.metric("time_to_first_token_seconds_count") == 6
    assert api.metric("inter_token_latency_seconds_count") == api.metric("generation_tokens_total") - 6
    assert api.metric("e2e_request_latency_seconds_count") == 6


def test_refused_requests_are_not_counted_as_served(api: Any) -> None:
    assert api.complete("x" * 300).status_code == 400
    assert api.complete("a", n=0).status_code == 400
    assert api.metric("admission_rejections_total", reason="context_length_exceeded") == 1
    for reason in ("stop", "length", "abort", "error"):
        assert api.metric("request_success_total", finished_reason=reason) == 0


def test_format_and_bounds(api: Any) -> None:
    for number in range(20):
        api.complete("a", model=f"m{number}", user=f"u{number}")
        api.get(f"/path{number}")
    reply = api.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    assert not any("m7" in str(family.samples) or "path7" in str(family.samples) for family in families.values())
    for family in families.values():
        if family.type == "histogram":
            for phase in {sample.labels.get("phase") for sample in family.samples}:
                series = [s for s in family.samples if s.labels.get("phase") == phase]
                buckets = [s for s in series if s.name.endswith("_bucket")]
                counts = [s.value for s in buckets]
                assert counts == sorted(counts) and buckets[-1].labels["le"] == "+Inf"
                assert [float(s.labels["le"]) for s in buckets] == sorted(float(s.labels["le"]) for s in buckets)
                assert [s.value for s in series if s.name.endswith("_count")] == [counts[-1]]
        assert not any(sample.name.endswith("_created") for sample in family.samples)


def test_engine_numbers(api: Any) -> None:
    stats = api.engine.stats
    stats.kv_usage, stats.prefix_queries, stats.num_preemptions_swap, stats.num_waiting = 0.25, 100, 3, 2
    api.engine.info.inventory = [
        {"kind": "policy", "name": "fcfs", "state": "active", "distribution": "hotswap", "version": "1"}
    ]
    assert api.metric("kv_cache_usage_perc") == api.metric("gpu_cache_usage_perc") == 0.25
    assert api.metric("prefix_cache_queries_total") == 100
    assert api.metric("num_preemptions_total", mode="swap") == 3
    assert api.metric("num_requests_waiting") == 2
    assert api.metric("cache_config_info", block_size="16") == 1
    assert api.metric("plugin_info", kind="policy", name="fcfs") == 1


def test_numbers_of_the_steps(api: Any) -> None:
    """The engine's histograms, which are not cumulative, become Prometheus' ones, which are."""
    stats = api.engine.stats
    for tokens in (1, 3, 100_000):
        stats.step_tokens.observe(tokens)
    stats.execute_times.observe(0.02)
    stats.num_observer_faults, stats.host_cache_usage = 4, 0.5
    stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_accepted_per_pos = 2, 6, 5, [3, 2]
    assert api.metric("iteration_tokens_total_count") == 3
    assert api.metric("iteration_tokens_total_sum") == 100_004
    assert api.metric("iteration_tokens_total_bucket", le="4.0") == 2
    assert api.metric("iteration_tokens_total_bucket", le="16384.0") == 2
    assert api.metric("step_seconds_count", phase="execute") == 1
    assert api.metric("step_seconds_bucket", phase="execute", le="0.01") == 0
    assert api.metric("step_seconds_bucket", phase="execute", le="0.025") == 1
    assert api.metric("step_seconds_count", phase="schedule") == 0
    assert api.metric("observer_faults_total") == 4
    assert api.metric("host_cache_usage_perc") == 0.5
    assert api.metric("spec_decode_num_drafts_total") == 2
    assert api.metric("spec_decode_num_draft_tokens_total") == 6
    assert api.metric("spec_decode_num_accepted_tokens_total") == 5
    assert api.metric("spec_decode_num_accepted_tokens_per_pos_total", position="1") == 2


def test_queue_and_prefill_times(make_api: Callable[..., Any]) -> None:
    """What the engine says about each choice, with its first token."""

    class Timed(FakeEngine):
        async def generate(self, *arguments: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
            first = True
            async for output in super().generate(*arguments, **options):
                if first:
                    output.queue_seconds, output.prefill_seconds = [0.25, 0.5], [0.125, 0.125]
                    first = False
                yield output

    api = make_api(Timed())
    assert api.complete("ab", n=2).status_code == 200
    assert api.metric("request_queue_time_seconds_sum") == 0.75
    assert api.metric("request_queue_time_seconds_count") == 2
    assert api.metric("request_prefill_time_seconds_sum") == 0.25


def test_namespace(make_api: Callable[..., Any]) -> None:
    text = make_api(metrics_namespace="vllm").get("/metrics").text
    assert "vllm:prompt_tokens_total" in text and "hotswap:" not in text
    with pytest.raises(UsageError, match="metrics-namespace"):
        make_api(metrics_namespace="no good")


def test_gauges_return_after_work(make_api: Callable[..., Any]) -> None:
    api = make_api(FakeEngine())
    api.complete("abc", n=3)
    assert api.metric("num_requests_running") == 0
    assert api.state.num_calls == 0
