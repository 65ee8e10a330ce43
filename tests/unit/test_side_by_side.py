"""Two answers compared: where they part, how far log-probabilities are apart, what the defaults say."""

from __future__ import annotations

import dataclasses

import pytest

from hotswap.server.bench.side_by_side import (
    Answer,
    Defaults,
    compare_answers,
    compare_defaults,
    compare_latency,
    first_difference,
    published_defaults,
)


@pytest.mark.parametrize(
    ("one", "other", "position"),
    [("abc", "abc", None), ("abc", "abd", 2), ("abc", "ab", 2), ("", "a", 0), ("", "", None), ([1, 2], [1, 3], 1)],
)
def test_first_difference(one: str, other: str, position: int | None) -> None:
    assert first_difference(one, other) == position == first_difference(other, one)


def answer(tokens: str, logprobs: list[float] | None, **fields: object) -> Answer:
    made = Answer("".join(tokens.split("|")), tokens.split("|"), logprobs, "length", 5, 3, 0.1, 0.5)
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def test_answers_that_part() -> None:
    row = compare_answers("p", "chat", answer("ab|c|de", [-0.1, -0.2, -1.0]), answer("ab|c|xy", [-0.15, -0.2, -1.1]))
    assert not row.same_text and (row.char, row.token) == (3, 2) and row.context == ("de", "xy")
    assert row.parting_logprobs == (-1.0, -1.1)
    assert row.logprob_max == pytest.approx(0.05) and row.logprob_mean == pytest.approx(0.025)
    assert row.is_different(10.0)


def test_logprobs_within_and_beyond_the_tolerance() -> None:
    row = compare_answers("p", "completions", answer("ab|c", [-0.1, -0.2]), answer("ab|c", [-0.1, -0.25]))
    assert row.same_text and row.token is None and row.logprob_max == pytest.approx(0.05)
    assert not row.is_different(0.1) and row.is_different(0.01)


def test_the_same_text_in_other_tokens() -> None:
    row = compare_answers("p", "completions", answer("ab|c", [-0.1, -0.2]), answer("a|bc", [-0.1, -0.2]))
    assert row.same_text and row.token == 0 and row.logprob_max is None and not row.is_different(0.1)


def test_servers_without_logprobs() -> None:
    bare = Answer("abc", finish_reason="length")
    row = compare_answers("p", "completions", bare, answer("ab|d", [-0.1, -0.2]))
    assert (row.char, row.token, row.logprob_max) == (2, None, None) and row.is_different(0.1)


def test_what_else_is_a_difference() -> None:
    base = answer("ab|c", [-0.1, -0.2])
    for changed in ({"prompt_tokens": 6}, {"finish_reason": "stop"}, {"error": "HTTP 500: x"}):
        assert compare_answers("p", "chat", base, dataclasses.replace(base, **changed)).is_different(0.1)
    for unknown in ({"prompt_tokens": None}, {"ttft": 99.0, "total": 99.0}):
        assert not compare_answers("p", "chat", base, dataclasses.replace(base, **unknown)).is_different(0.1)


def test_latency_is_the_median_of_ratios() -> None:
    found = compare_latency([(1.0, 2.0), (2.0, 2.0), (4.0, 2.0), (None, 1.0)])
    assert found is not None and (found.one, found.other, found.ratio, found.count) == (2.0, 2.0, 1.0, 3)
    assert compare_latency([(None, 1.0), (0.0, 1.0)]) is None


def test_defaults() -> None:
    one, other = Defaults(), Defaults()
    for name, a, b in (("software", "x", "y"), ("temperature", 1, 1.0), ("top_p", 1.0, 0.9), ("adds BOS", True, None)):
        one.learn(name, a, "published")
        if b is not None:
            other.learn(name, b, "published")
    other.learn("top_k", 20, "published")
    same = {row.name: row.same for row in compare_defaults(one, other)}
    assert same == {"software": True, "temperature": True, "top_p": False, "adds BOS": None, "top_k": None}


def test_published_defaults() -> None:
    assert published_defaults({"default_sampling_params": {"temperature": 0.6, "stop": ["x"]}}) == {"temperature": 0.6}
    assert published_defaults({}) == {}
