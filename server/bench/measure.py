"""What the records of a run say. Pure functions; docs/operators/bench.md has the same definitions in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from hotswap.core.load.distribution import Distribution, distribution
from hotswap.core.load.objectives import parse_limits


@dataclass(slots=True)
class Chunk:
    """A piece of an answer. tokens: how many it brought; 0 when the server does not say."""

    time: float
    tokens: int = 0


@dataclass(slots=True)
class RequestRecord:
    """One request as it went. Moments are seconds from the run's beginning.

    due: when it should have been sent (its arrival; for a later turn no earlier than the answer before). sent: when it
    was. end: the last chunk that carries output or the finish_reason; or the failure. chunks: those with output, in
    order. counted_by: "usage" when the server counted the output tokens, "chunks" when nobody did and one chunk is taken
    for one token, "engine" offline. error: the kind of failure; None for an answer that came whole. text, token_ids: kept
    for a conversation's next turn.
    """

    index: int
    due: float
    sent: float = 0.0
    end: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    counted_by: str = "chunks"
    finish_reason: str | None = None
    error: str | None = None
    error_detail: str = ""
    text: str = ""
    token_ids: list[int] | None = None
    streamed: bool = True


def ttft(record: RequestRecord) -> float | None:
    """Sending to the first chunk with output. None when the answer was not streamed: nobody saw the first token."""
    return record.chunks[0].time - record.sent if record.chunks and record.streamed else None


def e2e(record: RequestRecord) -> float:
    """Sending to the end of the answer."""
    return record.end - record.sent


def tpot(record: RequestRecord) -> float | None:
    """First chunk with output to the end, over the tokens after the first. None for fewer than two tokens or chunks."""
    if record.output_tokens < 2 or len(record.chunks) < 2:
        return None
    return (record.end - record.chunks[0].time) / (record.output_tokens - 1)


def itls(record: RequestRecord) -> list[float]:
    """Times between tokens.

    A chunk that is known to bring k tokens after a gap g counts as k samples of g / k; tokens that come together with
    the first one as samples of 0. The sum is last chunk less first, whatever was merged. A chunk whose tokens are not
    known is one sample of its whole gap.
    """
    samples: list[float] = []
    for number, chunk in enumerate(record.chunks):
        count = max(1, chunk.tokens)
        if number == 0:
            samples += [0.0] * (count - 1)
        else:
            samples += [(chunk.time - record.chunks[number - 1].time) / count] * count
    return samples


# Service level objectives.

_SLO_OF: Final[dict[str, Callable[[RequestRecord], float | None]]] = {"ttft": ttft, "tpot": tpot, "e2e": e2e}


@dataclass(frozen=True, slots=True)
class Slo:
    """Longest times a request may take, by measure."""

    text: str
    limits: dict[str, float]

    def met_by(self, record: RequestRecord) -> bool:
        """Whether an answer came whole and kept every limit. A measure that it does not have (TPOT of one token) is
        kept; TTFT of an answer that was not streamed is its E2E."""
        if record.error is not None:
            return False
        for name, limit in self.limits.items():
            value = _SLO_OF[name](record)
            if value is None and name == "ttft":
                value = e2e(record)
            if value is not None and value > limit:
                return False
        return True


def parse_slo(text: str) -> Slo:
    """`ttft:500ms,tpot:50ms,e2e:10s`; units us, ms, s, m. Raises UsageError."""
    return Slo(text, parse_limits(text))


# The summary.


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met the SLO: how many, what share of all that were sent, how many a second."""

    slo: str
    count: int
    share: float
    requests_per_second: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Rates are over `duration`: first request sent to last answer ended. Tokens are those of answers that came whole.

    start_delay: sent less due; the client's own, and that of --max-concurrency. chunks_with_several: share of the chunks
    that brought more than one token, as far as known from the counts; None when nothing is known. chunk_counts_known: of
    every chunk it is known how many tokens it brought: ITL is then between tokens.
    """

    num_requests: int
    num_completed: int
    errors: dict[str, int]
    error_examples: dict[str, str]
    duration: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    request_throughput: float
    prompt_throughput: float
    output_throughput: float
    total_throughput: float
    goodput: Goodput | None
    peak_concurrency: int
    achieved_rate: float | None
    counted_by: dict[str, int]
    chunks_with_several: float | None
    chunk_counts_known: bool
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    start_delay: Distribution | None
    finish_reasons: dict[str, int]


def summarize(records: Sequence[RequestRecord], slo: Slo | None = None) -> Summary:
    """Everything but the lengths asked for, from the records alone. Failed requests count as sent, never as served."""
    good = [record for record in records if record.error is None]
    begin = min((record.sent for record in records), default=0.0)
    duration = max((record.end for record in records), default=0.0) - begin
    prompt_tokens, output_tokens = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    per_second = 1 / duration if duration > 0 else 0.0
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    sent = sorted(record.sent for record in records)
    span = sent[-1] - sent[0] if sent else 0.0
    met = sum(slo.met_by(record) for record in records) if slo else 0
    examples: dict[str, str] = {}
    for record in records:
        if record.error is not None:
            examples.setdefault(record.error, record.error_detail)
    return Summary(
        num_requests=len(records),
        num_completed=len(good),
        errors=dict(Counter(r.error for r in records if r.error is not None).most_common()),
        error_examples=examples,
        duration=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        request_throughput=len(good) * per_second,
        prompt_throughput=prompt_tokens * per_second,
        output_throughput=output_tokens * per_second,
        total_throughput=(prompt_tokens + output_tokens) * per_second,
        goodput=Goodput(slo.text, met, met / max(1, len(records)), met * per_second) if slo else None,
        peak_concurrency=peak_concurrency(records),
        achieved_rate=(len(sent) - 1) / span if span > 0 else None,
        counted_by=dict(Counter(record.counted_by for record in good)),
        chunks_with_several=_share_of_merged_chunks(good),
        chunk_counts_known=all(chunk.tokens for record in good for chunk in record.chunks),
        ttft=distribution(value for r in good if (value := ttft(r)) is not None),
        tpot=distribution(value for r in good if (value := tpot(r)) is not None),
        itl=distribution(value for record in good for value in itls(record)),
        e2e=distribution(e2e(record) for record in good),
        start_delay=distribution(max(0.0, record.sent - record.due) for record in records),
        finish_reasons=dict(Counter(record.finish_reason or "none" for record in good).most_common()),
    )


def _share_of_merged_chunks(records: Sequence[RequestRecord]) -> float | None:
    """At most: tokens beyond one a chunk, over chunks; exact where the chunks' own counts are known."""
    merged = chunks = 0
    for record in records:
        if record.counted_by == "chunks" or not record.streamed:
            continue
        chunks += len(record.chunks)
        if all(chunk.tokens for chunk in record.chunks):
            merged += sum(chunk.tokens > 1 for chunk in record.chunks)
        else:
            merged += min(len(record.chunks), max(0, record.output_tokens - len(record.chunks)))
    return merged / chunks if chunks else None


def peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """Most requests between sending and end at one moment; one that ends as another is sent makes room first."""
    events = [(record.sent, 1) for record in records] + [(record.end, -1) for record in records]
    running = peak = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    return peak


# The timeline.


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bins of `width` seconds from the first request's sending. concurrency: mean number of requests in flight."""

    width: float
    output_tokens_per_second: tuple[float, ...]
    concurrency: tuple[float, ...]


def timeline(records: Sequence[RequestRecord], *, num_bins: int = 60) -> Timeline | None:
    """At most `num_bins` bins of a round width. Output is spread evenly over a request's chunks where their own counts
    are not known. None for no records or no time."""
    begin = min((record.sent for record in records), default=0.0)
    duration = max((record.end for record in records), default=0.0) - begin
    if duration <= 0:
        return None
    width = _round_width(duration / num_bins)
    count = max(1, math.ceil(duration / width - 1e-9))
    tokens, busy = [0.0] * count, [0.0] * count
    for record in records:
        known = all(chunk.tokens for chunk in record.chunks)
        each = record.output_tokens / max(1, len(record.chunks))
        for chunk in record.chunks:
            tokens[min(count - 1, int((chunk.time - begin) / width))] += chunk.tokens if known else each
        _add_interval(busy, record.sent - begin, record.end - begin, width)
    # The last bin may reach beyond the end: its means are over the part that was run.
    spans = [width] * (count - 1) + [max(duration - width * (count - 1), width * 1e-6)]
    return Timeline(
        width,
        tuple(value / span for value, span in zip(tokens, spans, strict=True)),
        tuple(value / span for value, span in zip(busy, spans, strict=True)),
    )


def _add_interval(bins: list[float], begin: float, end: float, width: float) -> None:
    first, last = int(begin / width), min(len(bins) - 1, int(end / width))
    for number in range(first, last + 1):
        bins[number] += max(0.0, min(end, (number + 1) * width) - max(begin, number * width))


def _round_width(smallest: float) -> float:
    power = 10.0 ** math.floor(math.log10(smallest))
    return next(width for step in (1, 2, 5, 10) if (width := step * power) >= smallest * (1 - 1e-9))
