"""Bug bank, group O: metrics, read with the official text parser."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hotswap.core.errors import UsageError
from hotswap.core.testing.fake_engine import FakeEngine

Eventually = Callable[[Callable[[], bool], float], None]


def relations(values: dict[tuple[str, str], float]) -> None:
    """docs/operators/metrics.md, "How the numbers relate"."""
    ended = sum(value for (name, _), value in values.items() if name == "request_success_total")
    assert values["generation_tokens_total", ""] == values["request_generation_tokens_sum", ""]
    assert values["prompt_tokens_total", ""] == values["request_prompt_tokens_sum", ""]
    assert ended == values["request_generation_tokens_count", ""] == values["e2e_request_latency_seconds_count", ""]
    started = values["time_to_first_token_seconds_count", ""]
    assert values["inter_token_latency_seconds_count", ""] == values["generation_tokens_total", ""] - started
    assert values["request_decode_time_seconds_count", ""] == started


# O01


def test_o01_closed_streams_are_counted_and_leave_no_gauge_behind(served: Any, eventually: Eventually) -> None:
    """Five streams closed after 64 bytes, then five whole answers that nobody waits for, then a finished one."""
    eventually(served.is_idle, 5.0)
    before = served.metrics()
    for stream in (True, False):
        for number in range(5):
            path = ("/v1/completions", "/v1/chat/completions")[number % 2]
            prompt = {"prompt": "L"} if number % 2 == 0 else {"messages": [{"role": "user", "content": "L"}]}
            connection = served.ask(path, {**prompt, "max_tokens": 900, "stream": stream})
            if stream:
                assert len(connection.recv(64)) == 64
            else:
                eventually(lambda: served.metrics()["num_requests_running", ""] > 0, 5.0)
            connection.close()
            eventually(served.is_idle, 1.0)
        expected = before["request_success_total", "abort"] + 5
        wait_for_aborts(served, expected, eventually)
        after = served.metrics()
        assert after["request_success_total", "abort"] == expected
        for reason in ("stop", "length", "error"):
            assert after["request_success_total", reason] == before["request_success_total", reason]
        relations(after)
        before = after
    usage = served.complete("H", temperature=0).json()["usage"]
    after = served.metrics()
    assert after["generation_tokens_total", ""] - before["generation_tokens_total", ""] == usage["completion_tokens"]
    assert after["prompt_tokens_total", ""] - before["prompt_tokens_total", ""] == usage["prompt_tokens"]
    assert after["request_success_total", "stop"] == before["request_success_total", "stop"] + 1
    relations(after)


def wait_for_aborts(served: Any, count: float, eventually: Eventually) -> None:
    eventually(lambda: served.metrics()["request_success_total", "abort"] >= count, 2.0)


# O02


def test_o02_counters_never_fall(served: Any, eventually: Eventually) -> None:
    """Scraped all the time while requests preempt each other, score prompts without a token, are refused and leave: no
    counter and no bucket ever decreases; idle scrapes are equal. Speculation joins with its issue."""
    eventually(served.is_idle, 5.0)
    start = served.metrics()
    done = threading.Event()
    faults: list[str] = []

    def scrape() -> None:
        last: dict[Any, float] = {}
        while not done.is_set():
            for family in text_string_to_metric_families(served.client.get("/metrics").text):
                for sample in family.samples:
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    if math.isnan(sample.value) or sample.value < 0:
                        faults.append(f"{key} is {sample.value}")
                    if family.type in ("counter", "histogram") and sample.value < last.get(key, 0.0):
                        faults.append(f"{key} fell from {last[key]} to {sample.value}")
                    last[key] = sample.value

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        hogs = [
            served.ask("/v1/completions", {"prompt": "L", "max_tokens": 620, "n": 4, "ignore_eos": True, "seed": 1})
        ]
        for _ in range(3):
            assert served.complete("P" + "x" * 9, max_tokens=0, echo=True, logprobs=0).status_code == 200
            assert served.complete("T", max_tokens=3, n=2).status_code == 200
            assert served.complete("x", max_tokens=-1).status_code == 400
            assert served.complete("x" * 2000).status_code == 400
            served.ask("/v1/completions", {"prompt": "L", "max_tokens": 900, "stream": True}).close()
        for hog in hogs:
            hog.settimeout(60)
            assert hog.recv(12) == b"HTTP/1.1 200"
            hog.close()
        eventually(served.is_idle, 5.0)
    finally:
        done.set()
        thread.join()
    assert not faults, faults[:5]
    end = served.metrics()
    assert end["num_preemptions_total", "recompute"] > start["num_preemptions_total", "recompute"]
    assert served.metrics() == end
    relations(end)


def test_o02_n_counts_the_prompt_once_and_every_choice(make_api: Callable[..., Any]) -> None:
    """docs/operators/metrics.md: prompt_tokens once a prompt; generation_tokens and request_success for each choice; the
    same as `usage`."""
    for path, body in (
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/completions", {"prompt": ["abc", "de"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ):
        for n in (1, 2, 3):
            api = make_api(FakeEngine(lambda p, c: [80, 81, 82]))
            usage = api.post(path, {**body, "n": n, "max_tokens": 3}).json()["usage"]
            prompts = 2 if isinstance(body.get("prompt"), list) else 1
            assert api.metric("prompt_tokens_total") == usage["prompt_tokens"]
            assert api.metric("generation_tokens_total") == usage["completion_tokens"] == 3 * n * prompts
            assert api.metric("request_success_total", finished_reason="length") == n * prompts
            assert api.metric("request_prompt_tokens_count") == prompts


@pytest.mark.parametrize("broken", ["generation_tokens", "time_to_first_token", "e2e_latency", "prompt_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_o02_a_fault_of_counting_fails_no_request(
    make_api: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, broken: str, stream: bool
) -> None:
    import hotswap.server.metrics as module

    made: list[Any] = []
    init = module.ServerMetrics.__init__

    class Broken:
        def inc(self, amount: float = 1) -> None:
            raise ValueError("Counters can only be incremented by non-negative amounts.")

        observe = inc

    def remember(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        setattr(self, broken, Broken())
        made.append(self)

    monkeypatch.setattr(module.ServerMetrics, "__init__", remember)
    api = make_api()
    for _ in range(2):
        reply = api.complete("abc", stream=stream)
        assert made and reply.status_code == 200
        assert "cba" in reply.text.replace('"}', "") or stream
        assert not stream or (reply.text.endswith("data: [DONE]\n\n") and '"error"' not in reply.text)
    assert api.get("/metrics").status_code == 200


# O04


def test_o04_the_exposition_is_what_the_format_says(served: Any) -> None:
    """Content type, names, buckets ascending with +Inf = count, sums, no series twice, no created-timestamps."""
    reply = served.client.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert reply.text.startswith("# HELP ") and reply.text.endswith("\n")
    seen = set()
    for family in text_string_to_metric_families(reply.text):
        assert family.documentation and family.type in ("counter", "gauge", "histogram")
        buckets: dict[Any, list[tuple[float, float]]] = defaultdict(list)
        counts: dict[Any, float] = {}
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in seen and not sample.name.endswith("_created")
            seen.add(key)
            assert {"model_name", "engine"} <= sample.labels.keys() and sample.name.startswith("hotswap:")
            rest = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
            if sample.name.endswith("_bucket"):
                buckets[rest].append((float(sample.labels["le"]), sample.value))
            elif family.type == "histogram" and sample.name.endswith("_count"):
                counts[rest] = sample.value
        assert (family.type == "histogram") == bool(buckets)
        for labels, found in buckets.items():
            bounds = [bound for bound, _ in found]
            assert bounds == sorted(set(bounds)) and bounds[-1] == math.inf
            values = [value for _, value in found]
            assert values == sorted(values) and values[-1] == counts[labels]


def series_of(api: Any) -> set[Any]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(api.get("/metrics").text)
        for sample in family.samples
    }


def flood(api: Any, count: int) -> None:
    for number in range(count):
        kind = number % 5
        if kind == 0:
            assert api.complete("a", model=f"model-{number}").status_code == 404
        elif kind == 1:
            assert api.get(f"/v1/models/m{number}").status_code == 404
        elif kind == 2:
            assert api.get(f"/no/such/path/{number}", headers={"x-request-id": f"id-{number}"}).status_code == 404
        elif kind == 3:
            headers = {"x-request-id": f"id-{number}", "user-agent": f"agent/{number}"}
            fields = {"user": f"u{number}", "cache_salt": f"s{number}", "request_id": f"r{number}", "max_tokens": 1}
            assert api.post("/v1/completions", {"prompt": "a", **fields}, headers=headers).status_code == 200
        else:
            assert api.post("/v1/completions", {"prompt": "a", f"field{number}": number}).status_code == 400


def check_flood(api: Any, count: int) -> None:
    """Whatever kinds of calls there are have been made once; then many more, and the series are the same."""
    flood(api, 10)
    before = series_of(api)
    flood(api, count)
    assert series_of(api) == before


def test_o04_names_from_outside_make_no_series(make_api: Callable[..., Any]) -> None:
    """400 distinct model names, ids, paths, users, salts; the 10,000 of the bank are in the full run."""
    check_flood(make_api(), 400)


@pytest.mark.full
def test_o04_ten_thousand_names_make_no_series(make_api: Callable[..., Any]) -> None:
    check_flood(make_api(), 10_000)


def test_o04_a_served_name_is_a_clean_label(make_api: Callable[..., Any]) -> None:
    """What could need escaping is refused at start; every other name comes back from the parser as it was given."""
    name = "Org/model-1.5:q4+x@y"
    api = make_api(engine_settings={"served_model_name": [name]})
    assert api.complete("abc", model=name).status_code == 200
    assert {dict(labels)["model_name"] for _, labels in series_of(api)} == {name}
    for bad in ('a"b', "a\nb", "a\\b", "", "é"):
        with pytest.raises(UsageError):
            make_api(engine_settings={"served_model_name": [bad]})


def test_o04_scraping_is_quick(served: Any) -> None:
    """An idle scrape takes milliseconds: nothing is computed over requests."""
    began = time.monotonic()
    for _ in range(10):
        served.client.get("/metrics")
    assert time.monotonic() - began < 2.0
