"""What an outcome says. Times in seconds, as `hotswap bench` measures them but for what HTTP adds (docs/operators/bench.md)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..contracts.observer import FinishedRequest
from ..load.distribution import Distribution, distribution
from .simulation import Outcome

_ANSWERED: Final = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Goodput:
    """Answers that kept every limit: how many, what share of all requests, how many a second."""

    limits: Mapping[str, float]
    count: int
    share: float
    requests_per_second: float


@dataclass(frozen=True, slots=True)
class Results:
    """Rates are over `duration`: first arrival to last end. Tokens are those of answered requests.

    refused: reason -> requests turned away at the door. shed: requests that the policy gave up on, or that failed.
    queue: arrival to first scheduled. fairness: see jain_index. hit_rate: prompt tokens found in the prefix cache, of
    all; None without one. busy: share of the time in which a step ran.
    """

    num_requests: int
    num_answered: int
    refused: Mapping[str, int]
    shed: int
    duration: float
    prompt_tokens: int
    output_tokens: int
    request_throughput: float
    prompt_throughput: float
    output_throughput: float
    ttft: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    queue: Distribution | None
    goodput: Goodput | None
    num_preemptions: int
    num_users: int
    fairness: float
    hit_rate: float | None
    num_steps: int
    tokens_per_step: float
    busy: float


def ttft(request: FinishedRequest) -> float | None:
    """Arrival to first token."""
    first = request.first_token_time
    return None if first is None else first - request.arrival_time


def tpot(request: FinishedRequest) -> float | None:
    """First token to the end, over the tokens after the first. None for fewer than two."""
    first, count = request.first_token_time, request.num_output_tokens
    return None if first is None or count < 2 else (request.finish_time - first) / (count - 1)


def e2e(request: FinishedRequest) -> float:
    """Arrival to the end."""
    return request.finish_time - request.arrival_time


def meets(request: FinishedRequest, limits: Mapping[str, float]) -> bool:
    """Whether an answer kept every limit. A measure that it does not have (TPOT of one token) is kept."""
    values = {"ttft": ttft(request), "tpot": tpot(request), "e2e": e2e(request)}
    return all(value is None or value <= limits[name] for name, value in values.items() if name in limits)


def jain_index(values: Iterable[float]) -> float:
    """(sum x)^2 / (n sum x^2): 1 when all are alike, 1 / n when one has everything (Jain, Chiu and Hawe, DEC-TR-301,
    1984). 1 for none."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 1.0


def service_rates(requests: Iterable[FinishedRequest]) -> dict[str, float]:
    """Tokens a second (prompt and output) that each user got while it had a request in the engine: what a user who asks
    ten times as much takes from the others shows, and that it asks more does not by itself."""
    tokens: Counter[str] = Counter()
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for request in requests:
        tokens[request.user] += request.num_prompt_tokens + request.num_output_tokens
        spans[request.user].append((request.arrival_time, request.finish_time))
    return {user: tokens[user] / covered for user, found in spans.items() if (covered := _covered(found)) > 0}


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


def summarize(outcome: Outcome, limits: Mapping[str, float] | None = None) -> Results:
    """limits: an SLO, seconds by measure."""
    finished, totals = outcome.finished, outcome.totals
    answered = [request for request in finished if request.finish_reason in _ANSWERED]
    num_requests = len(finished) + sum(outcome.refused.values())
    begin = min((request.arrival_time for request in finished), default=0.0)
    duration = max((request.finish_time for request in finished), default=begin) - begin
    per_second = 1 / duration if duration > 0 else 0.0
    prompt_tokens = sum(request.num_prompt_tokens for request in answered)
    output_tokens = sum(request.num_output_tokens for request in answered)
    goodput = None
    if limits is not None:
        met = sum(meets(request, limits) for request in answered)
        goodput = Goodput(dict(limits), met, met / max(1, num_requests), met * per_second)
    rates = service_rates(answered)
    return Results(
        num_requests=num_requests,
        num_answered=len(answered),
        refused=outcome.refused,
        shed=len(finished) - len(answered),
        duration=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        request_throughput=len(answered) * per_second,
        prompt_throughput=prompt_tokens * per_second,
        output_throughput=output_tokens * per_second,
        ttft=distribution(value for request in answered if (value := ttft(request)) is not None),
        tpot=distribution(value for request in answered if (value := tpot(request)) is not None),
        e2e=distribution(map(e2e, answered)),
        queue=distribution(
            request.first_scheduled_time - request.arrival_time
            for request in answered
            if request.first_scheduled_time is not None
        ),
        goodput=goodput,
        num_preemptions=totals.num_preemptions,
        num_users=len(rates),
        fairness=jain_index(rates.values()),
        hit_rate=totals.prefix_hits / totals.prefix_queries if totals.prefix_queries else None,
        num_steps=totals.num_steps,
        tokens_per_step=totals.num_tokens / totals.num_steps if totals.num_steps else 0.0,
        busy=totals.busy_seconds * per_second,
    )
