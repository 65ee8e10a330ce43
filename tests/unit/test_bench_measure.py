"""What a benchmark's records say: the definitions of docs/operators/bench.md, on records whose times are chosen."""

from __future__ import annotations

from random import Random

import numpy
import pytest

from hotswap.core.errors import UsageError
from hotswap.core.load.distribution import QUANTILE_STEPS, distribution, percentile
from hotswap.server.bench import measure
from hotswap.server.bench.measure import Chunk, RequestRecord, itls, parse_slo, summarize, timeline


def record(
    index: int = 0, sent: float = 0.0, chunks: tuple[tuple[float, int], ...] = (), **fields: object
) -> RequestRecord:
    made = RequestRecord(index, due=sent, sent=sent, chunks=[Chunk(*chunk) for chunk in chunks])
    made.end = chunks[-1][0] if chunks else sent
    made.output_tokens = sum(max(1, count) for _, count in chunks)
    made.prompt_tokens = 10
    made.counted_by = "usage"
    for name, value in fields.items():
        setattr(made, name, value)
    return made


STEADY = ((1.5, 1), (1.7, 1), (1.9, 1), (2.1, 1))


def test_times_of_one_request() -> None:
    one = record(sent=1.0, chunks=STEADY)
    assert measure.ttft(one) == pytest.approx(0.5)
    assert measure.e2e(one) == pytest.approx(1.1)
    assert measure.tpot(one) == pytest.approx(0.2)
    assert itls(one) == pytest.approx([0.2, 0.2, 0.2])


def test_the_end_may_come_after_the_last_text() -> None:
    """An end-of-sequence token has no text, but it is a token of the answer and the reader waits for it."""
    one = record(sent=1.0, chunks=STEADY, end=2.3, output_tokens=5)
    assert measure.e2e(one) == pytest.approx(1.3)
    assert measure.tpot(one) == pytest.approx(0.8 / 4)


def test_itl_of_merged_chunks() -> None:
    """Two tokens with the first, then three at once after 0.3 s, then one after 0.1 s."""
    merged = record(sent=0.0, chunks=((1.0, 2), (1.3, 3), (1.4, 1)))
    assert itls(merged) == pytest.approx([0.0, 0.1, 0.1, 0.1, 0.1])
    assert sum(itls(merged)) == pytest.approx(0.4)
    assert len(itls(merged)) == merged.output_tokens - 1
    assert measure.tpot(merged) == pytest.approx(0.4 / 5)


def test_itl_of_chunks_that_do_not_say_what_they_hold() -> None:
    unknown = record(sent=0.0, chunks=((1.0, 0), (1.3, 0), (1.4, 0)), output_tokens=6)
    assert itls(unknown) == pytest.approx([0.3, 0.1])
    assert measure.tpot(unknown) == pytest.approx(0.4 / 5), "TPOT goes by the usage, whatever the chunks were"


def test_measures_that_an_answer_does_not_have() -> None:
    assert measure.tpot(record(chunks=((1.0, 1),))) is None
    assert measure.tpot(record(chunks=((1.0, 5),))) is None, "all tokens at one moment: no time between them was seen"
    whole = record(chunks=((1.0, 0),), streamed=False)
    assert measure.ttft(whole) is None and measure.e2e(whole) == 1.0


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(count: int) -> None:
    random = Random(count)
    values = sorted(random.random() for _ in range(count))
    for percent in (0, 1, 50, 90, 95, 99, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_percentiles_by_hand() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([10.0, 20.0], 90) == pytest.approx(19.0)
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 50)


def test_distribution() -> None:
    found = distribution([3.0, 1.0, 2.0])
    assert found is not None
    assert (found.count, found.mean, found.p50, found.min, found.max) == (3, 2.0, 2.0, 1.0, 3.0)
    assert len(found.quantiles) == QUANTILE_STEPS + 1
    assert found.quantiles[0] == 1.0 and found.quantiles[100] == 2.0 and found.quantiles[-1] == 3.0
    assert distribution([]) is None


# SLO.


def test_slo() -> None:
    slo = parse_slo("ttft:500ms, tpot:0.25s,e2e:1m")
    assert slo.limits == pytest.approx({"ttft": 0.5, "tpot": 0.25, "e2e": 60.0})
    assert slo.met_by(record(sent=1.01, chunks=STEADY))
    assert not slo.met_by(record(sent=0.9, chunks=STEADY)), "TTFT 600 ms"
    assert not slo.met_by(record(sent=1.01, chunks=STEADY, error="timeout"))
    assert parse_slo("tpot:1ms").met_by(record(chunks=((1.0, 1),))), "one token has no time between tokens"
    assert not parse_slo("ttft:500ms").met_by(record(chunks=((1.0, 0),), streamed=False))


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:5", "ttft:-1s", "ttft:xms", "itl:1s", "ttft:1s,ttft:2s", "ttft:0ms"]
)
def test_slos_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="SLO"):
        parse_slo(text)


def test_goodput_counts_requests_that_kept_every_limit() -> None:
    records = [
        record(0, 0.0, ((0.1, 1), (0.2, 1))),
        record(1, 0.0, ((0.9, 1), (1.0, 1))),  # TTFT too long
        record(2, 0.0, ((0.1, 1), (2.0, 1))),  # TPOT too long
        record(3, 0.0, (), error="HTTP 500", error_detail="x", end=0.1),
    ]
    found = summarize(records, parse_slo("ttft:500ms,tpot:500ms")).goodput
    assert found is not None
    assert (found.count, found.share) == (1, 0.25) and found.requests_per_second == pytest.approx(1 / 2.0)
    assert summarize(records).goodput is None


# The summary.


def test_summary() -> None:
    records = [
        record(0, 1.0, ((2.0, 1), (3.0, 1)), cached_tokens=4),
        record(1, 2.0, ((4.0, 1), (5.0, 1), (6.0, 1)), due=1.5),
        record(2, 2.5, (), error="HTTP 429", error_detail="full", end=2.6, output_tokens=0),
        record(3, 2.5, (), error="HTTP 429", error_detail="full again", end=2.6, output_tokens=0),
    ]
    found = summarize(records)
    assert (found.num_requests, found.num_completed, found.duration) == (4, 2, 5.0)
    assert found.errors == {"HTTP 429": 2} and found.error_examples == {"HTTP 429": "full"}
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (20, 5, 4)
    assert found.request_throughput == pytest.approx(2 / 5)
    assert found.output_throughput == pytest.approx(1.0) and found.total_throughput == pytest.approx(5.0)
    assert found.achieved_rate == pytest.approx(3 / 1.5)
    assert found.ttft is not None and found.ttft.count == 2 and found.ttft.mean == pytest.approx(1.5)
    assert found.start_delay is not None and found.start_delay.max == pytest.approx(0.5)
    assert found.peak_concurrency == 4
    assert found.counted_by == {"usage": 2}


def test_summary_of_nothing_that_worked() -> None:
    found = summarize([record(error="no connection", error_detail="x")])
    assert found.num_completed == 0 and found.ttft is None and found.request_throughput == 0.0
    assert summarize([]).num_requests == 0


def test_peak_concurrency_is_of_one_moment() -> None:
    back_to_back = [record(n, float(n), ((n + 1.0, 1),)) for n in range(5)]
    assert measure.peak_concurrency(back_to_back) == 1
    assert measure.peak_concurrency([record(n, 0.1 * n, ((1.0, 1),)) for n in range(5)]) == 5


def test_share_of_chunks_with_several_tokens() -> None:
    known = record(chunks=((1.0, 1), (1.1, 3)))
    assert summarize([known]).chunks_with_several == 0.5
    guessed = record(chunks=((1.0, 0), (1.1, 0), (1.2, 0), (1.3, 0)), output_tokens=5)
    assert summarize([guessed]).chunks_with_several == 0.25
    assert summarize([record(chunks=((1.0, 0),), counted_by="chunks")]).chunks_with_several is None


def test_timeline_keeps_tokens_and_time() -> None:
    random = Random(0)
    records = []
    for index in range(20):
        sent = 3.0 + random.random() * 10
        times = sorted(sent + random.random() * 5 for _ in range(8))
        records.append(record(index, sent, tuple((time, index % 2) for time in times)))
    line = timeline(records)
    assert line is not None and len(line.concurrency) <= 60
    duration = summarize(records).duration
    spans = [line.width] * (len(line.concurrency) - 1)
    spans.append(duration - sum(spans))
    tokens = sum(rate * span for rate, span in zip(line.output_tokens_per_second, spans, strict=True))
    assert tokens == pytest.approx(sum(r.output_tokens for r in records))
    busy = sum(value * span for value, span in zip(line.concurrency, spans, strict=True))
    assert busy == pytest.approx(sum(measure.e2e(r) for r in records))
    assert max(line.concurrency) <= measure.peak_concurrency(records)


def test_timeline_of_no_time() -> None:
    assert timeline([]) is None and timeline([record()]) is None
