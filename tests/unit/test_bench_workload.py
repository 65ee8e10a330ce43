"""What a benchmark asks, and when: distributions of lengths, arrival processes, workloads, prompts."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hotswap.core.errors import UsageError
from hotswap.core.load.arrivals import arrival_times
from hotswap.core.load.lengths import parse_lengths
from hotswap.core.trace import TraceRow, read_trace, write_trace
from hotswap.server.bench.prompts import ChatPrompts, PromptMaker, TokenIdPrompts, Turn, WordPrompts
from hotswap.server.bench.workload import (
    PlannedRequest,
    Sent,
    Shape,
    Workload,
    check_window,
    from_dataset,
    from_trace,
    synthetic,
    trace_rows,
)

COUNT = 20_000


def gaps(process: str, rate: float, burstiness: float = 1.0) -> list[float]:
    times = arrival_times(process, rate, COUNT, Random(7), burstiness=burstiness)  # type: ignore[arg-type]
    assert times[0] == 0 and times == sorted(times)
    return [b - a for a, b in itertools.pairwise(times)]


def variation(values: list[float]) -> float:
    return statistics.pstdev(values) / statistics.fmean(values)


# Arrivals. With 20,000 gaps the mean of a sample is within 4 % and its variation within 8 % of the process's own.


@pytest.mark.parametrize(
    ("process", "burstiness", "expected"),
    [("poisson", 1.0, 1.0), ("bursty", 0.25, 2.0), ("bursty", 1.0, 1.0), ("bursty", 4.0, 0.5), ("uniform", 1.0, 0.0)],
)
def test_arrivals_have_the_rate_and_the_burstiness(process: str, burstiness: float, expected: float) -> None:
    found = gaps(process, 5.0, burstiness)
    assert statistics.fmean(found) == pytest.approx(1 / 5, rel=0.04)
    assert variation(found) == pytest.approx(expected, rel=0.08, abs=1e-6)


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    """What makes a process poisson: the number of arrivals in a window has a variance equal to its mean."""
    times = arrival_times("poisson", 10.0, COUNT, Random(3))
    counts = [0] * (int(times[-1]) + 1)
    for time in times:
        counts[int(time)] += 1
    whole = counts[:-1]
    assert statistics.pvariance(whole) / statistics.fmean(whole) == pytest.approx(1.0, abs=0.12)


def test_bursty_is_not_poisson() -> None:
    assert abs(variation(gaps("bursty", 5.0, 0.25)) - 1) > 0.5


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_times("poisson", math.inf, 3, Random(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_rates_that_are_none(rate: float) -> None:
    with pytest.raises(UsageError, match="rate"):
        arrival_times("poisson", rate, 3, Random(0))
    with pytest.raises(UsageError, match="burstiness"):
        arrival_times("bursty", 1.0, 3, Random(0), burstiness=0.0)


# Lengths.


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("128", 128, 0),
        ("uniform:10,30", 20, math.sqrt((21**2 - 1) / 12)),
        ("normal:200,20", 200, 20),
        ("lognormal:200,0.5", 200, 200 * math.sqrt(math.exp(0.25) - 1)),
        ("exponential:100", 100, 100),
    ],
)
def test_lengths_have_the_mean_and_the_spread(text: str, mean: float, deviation: float) -> None:
    lengths, random = parse_lengths(text), Random(5)
    drawn = [lengths.draw(random) for _ in range(COUNT)]
    assert all(type(value) is int and value >= 1 for value in drawn)
    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.03)
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.06, abs=0.01)


def test_uniform_reaches_both_ends() -> None:
    lengths, random = parse_lengths("uniform:3,5"), Random(1)
    assert {lengths.draw(random) for _ in range(200)} == {3, 4, 5}


def test_zipf_falls_as_a_power() -> None:
    lengths, random = parse_lengths("zipf:1,100"), Random(2)
    drawn = [lengths.draw(random) for _ in range(COUNT)]
    assert min(drawn) == 1 and max(drawn) <= 100
    assert drawn.count(1) / drawn.count(2) == pytest.approx(2, rel=0.1)
    assert drawn.count(1) / drawn.count(4) == pytest.approx(4, rel=0.15)


def test_what_falls_below_one_becomes_one() -> None:
    lengths, random = parse_lengths("normal:1,50"), Random(4)
    assert min(lengths.draw(random) for _ in range(200)) == 1


NO_LENGTHS = (
    "0 -3 1.5 x uniform:5 uniform:5,2 uniform:0,4 gauss:1,2 normal:1 zipf:1,0 lognormal:0,1 normal:nan,1 uniform:1,inf "
    "normal:1,2,3"
)


@pytest.mark.parametrize("text", ["", *NO_LENGTHS.split()])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--input-len"):
        parse_lengths(text, "--input-len")


# Workloads.


def shape(number: int = 100, **settings: object) -> Shape:
    lengths = {"input_lengths": parse_lengths("uniform:5,9"), "output_lengths": parse_lengths("4")}
    return Shape(number, **{**lengths, **settings})  # type: ignore[arg-type]


def test_the_same_seed_is_the_same_workload() -> None:
    assert synthetic(shape(rate=3.0), 1) == synthetic(shape(rate=3.0), 1) != synthetic(shape(rate=3.0), 2)


def test_another_rate_changes_no_length() -> None:
    slow, quick = synthetic(shape(rate=1.0), 1), synthetic(shape(rate=9.0), 1)
    assert [r.prompt_tokens for r in slow.requests] == [r.prompt_tokens for r in quick.requests]
    assert slow.planned_rate is not None and quick.planned_rate is not None
    assert quick.planned_rate == pytest.approx(9 * slow.planned_rate)


def test_shared_prefixes_come_on_top() -> None:
    workload = synthetic(shape(shared_prefix_tokens=32, num_prefixes=3), 0)
    assert {request.prefix for request in workload.requests} == {"0", "1", "2"}
    assert all(37 <= request.prompt_tokens <= 41 and request.prefix_tokens == 32 for request in workload.requests)


def test_turns_take_turns() -> None:
    workload = synthetic(shape(7, turns=3, rate=1.0), 0)
    assert [(r.session, r.turn) for r in workload.requests] == [
        ("session-0", 0), ("session-1", 0), ("session-2", 0), ("session-0", 1), ("session-1", 1), ("session-2", 1),
        ("session-0", 2),
    ]  # fmt: skip
    first, second, third = (workload.requests[i] for i in (0, 3, 6))
    assert second.prompt_tokens == first.prompt_tokens + 4 + second.new_tokens
    assert third.prompt_tokens == second.prompt_tokens + 4 + third.new_tokens
    assert [r.arrival for r in workload.requests] == sorted(r.arrival for r in workload.requests)


def test_a_trace_is_played(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        TraceRow(4.0, 20, 3, session="s"),
        TraceRow(0.0, 10, 0, session="s", user="u", priority=2),
        TraceRow(2.0, 12, 5, prefix="faq", prefix_tokens=8),
    ]
    write_trace(path, rows)
    workload = from_trace(path, speed=2.0)
    assert [r.arrival for r in workload.requests] == [0.0, 1.0, 2.0]
    assert [r.turn for r in workload.requests] == [0, 0, 1]
    assert workload.requests[0].output_tokens == 1 and "1 rows" in workload.notes[0]
    assert workload.requests[0].user == "u" and workload.requests[0].priority == 2
    assert workload.requests[1].prefix_tokens == 8
    assert len(from_trace(path, limit=2).requests) == 2
    assert {r.arrival for r in workload.at_once().requests} == {0.0}
    with pytest.raises(UsageError, match="speed"):
        from_trace(path, speed=0)


def test_what_was_sent_can_be_played_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    request = PlannedRequest(0, 9.0, 30, 4, prefix="p", prefix_tokens=20, session="s", user="u", priority=1)
    write_trace(path, trace_rows([Sent(request, 10.5, 31, 4), Sent(request, 10.0, 12, 2)]))
    assert read_trace(path) == [
        TraceRow(0.0, 12, 2, user="u", priority=1, prefix="p", prefix_tokens=12, session="s"),
        TraceRow(0.5, 31, 4, user="u", priority=1, prefix="p", prefix_tokens=20, session="s"),
    ]


def test_a_dataset_goes_round(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = ['"one"', '{"prompt": "two", "output_tokens": 9}', "", '{"messages": [{"role": "user", "content": "x"}]}']
    path.write_text("\n".join(lines))
    workload = from_dataset(path, shape(), 0, given_number=4, given_output=False)
    assert [r.text for r in workload.requests] == ["one", "two", None, "one"]
    assert [r.output_tokens for r in workload.requests] == [4, 9, 4, 4]
    assert workload.requests[2].messages is not None and "asked again" in workload.notes[0]
    all_lines = from_dataset(path, shape(), 0, given_number=None, given_output=True)
    assert [r.output_tokens for r in all_lines.requests] == [4, 4, 4] and not all_lines.notes


@pytest.mark.parametrize(
    "line", ["{", "5", "{}", '{"prompt": 1}', '{"messages": []}', '{"prompt": "a", "output_tokens": 0}']
)
def test_dataset_lines_that_are_none(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    with pytest.raises(UsageError, match="line 2"):
        from_dataset(path, shape(), 0, given_number=None, given_output=False)


def test_the_window_is_checked_before_anything_is_sent() -> None:
    requests = [PlannedRequest(0, 0.0, 60, 4), PlannedRequest(1, 0.0, 61, 4)]
    check_window(requests, 65)
    check_window(requests, None)
    with pytest.raises(UsageError, match="1 requests do not fit the window of 64 tokens; the first one is request 1"):
        check_window(requests, 64)


# Prompts.


def make(maker: PromptMaker, request: PlannedRequest, before: Turn | None = None) -> Any:
    """The Prompt; Any, because each test knows which of its members is there."""
    return asyncio.run(maker.make(request, before))


def test_token_ids_are_exactly_as_long_and_share_their_prefix() -> None:
    maker = TokenIdPrompts(range(100, 150), 0)
    one = make(maker, PlannedRequest(0, 0.0, 40, 4, prefix="a", prefix_tokens=30)).token_ids
    two = make(maker, PlannedRequest(1, 0.0, 50, 4, prefix="a", prefix_tokens=30)).token_ids
    other = make(maker, PlannedRequest(2, 0.0, 40, 4, prefix="b", prefix_tokens=30)).token_ids
    assert (len(one), len(two), len(other)) == (40, 50, 40)
    assert one[:30] == two[:30] != other[:30] and one[30:] != two[30:40]
    assert set(one) <= set(range(100, 150))
    again = make(TokenIdPrompts(range(100, 150), 0), PlannedRequest(0, 5.0, 40, 9, prefix="a", prefix_tokens=30))
    assert again.token_ids == one


def test_a_later_turn_holds_the_real_answer() -> None:
    maker = TokenIdPrompts(range(100, 150), 0)
    first = make(maker, PlannedRequest(0, 0.0, 10, 4, session="s"))
    turn = Turn(first, "xyz", [7, 8, 9], 10, 3)
    grown = make(maker, PlannedRequest(1, 0.0, 20, 4, session="s", turn=1, new_tokens=5), turn).token_ids
    assert grown[:13] == (*first.token_ids, 7, 8, 9) and len(grown) == 18
    traced = make(maker, PlannedRequest(1, 0.0, 20, 4, session="s", turn=1), turn).token_ids
    assert traced[:13] == grown[:13] and len(traced) == 20
    short = make(maker, PlannedRequest(1, 0.0, 5, 4, session="s", turn=1), turn).token_ids
    assert len(short) == 14, "a trace whose answers were shorter: one new token, at least"


def test_an_answer_without_ids_is_tokenized() -> None:
    async def tokenize(text: str) -> list[int]:
        return [ord(c) for c in text]

    maker = TokenIdPrompts(range(100, 150), 0, tokenize)
    first = make(maker, PlannedRequest(0, 0.0, 2, 4, session="s"))
    grown = make(maker, PlannedRequest(1, 0.0, 9, 4, session="s", turn=1, new_tokens=1), Turn(first, "ab", None, 2, 2))
    assert grown.token_ids[2:4] == (97, 98)


def test_words() -> None:
    maker = WordPrompts(0)
    one = make(maker, PlannedRequest(0, 0.0, 12, 4, prefix="a", prefix_tokens=8)).text
    two = make(maker, PlannedRequest(1, 0.0, 12, 4, prefix="a", prefix_tokens=8)).text
    assert len(one.split()) == 12 and one.split()[:8] == two.split()[:8] and one != two
    turn = Turn(make(maker, PlannedRequest(0, 0.0, 2, 1)), " yes", None, 2, 1)
    later = make(maker, PlannedRequest(2, 0.0, 0, 4, turn=1, new_tokens=3), turn).text
    assert " yes " in later and len(later.split()) == 6


def test_chat_messages_are_fitted_to_the_length() -> None:
    """A tokenizer of the test's: two tokens a word, and a template of 7 tokens a message."""

    async def count(messages: Any) -> int:
        return sum(7 + 2 * len(m["content"].split()) for m in messages)

    maker = ChatPrompts(0, count)
    messages = make(maker, PlannedRequest(0, 0.0, 101, 4)).messages
    assert asyncio.run(count(messages)) in (101, 100, 102)
    with_prefix = make(maker, PlannedRequest(0, 0.0, 101, 4, prefix="p", prefix_tokens=10)).messages
    assert [m["role"] for m in with_prefix] == ["system", "user"]
    turn = Turn(make(maker, PlannedRequest(0, 0.0, 31, 4)), "so it is", None, 31, 3)
    later = make(maker, PlannedRequest(1, 0.0, 0, 4, turn=1, new_tokens=20), turn).messages
    assert [m["role"] for m in later] == ["user", "assistant", "user"] and later[1]["content"] == "so it is"


def test_chat_without_a_tokenizer_counts_words() -> None:
    maker = ChatPrompts(0)
    (message,) = make(maker, PlannedRequest(0, 0.0, 9, 4)).messages
    assert len(message["content"].split()) == 9 and "not counted" in maker.how


def test_workload_rate_of_simultaneous_arrivals() -> None:
    assert Workload("x", (PlannedRequest(0, 0.0, 1, 1), PlannedRequest(1, 0.0, 1, 1))).planned_rate is None
    assert json.dumps(synthetic(shape(2, rate=2.0), 0).planned_rate)
