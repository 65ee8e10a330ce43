"""Metrics tell the truth, and their series are bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hotswap.core.errors import UsageError
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
            buckets = [s for s in family.samples if s.name.endswith("_bucket")]
            counts = [s.value for s in buckets]
            assert counts == sorted(counts) and buckets[-1].labels["le"] == "+Inf"
            assert [float(s.labels["le"]) for s in buckets] == sorted(float(s.labels["le"]) for s in buckets)
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
