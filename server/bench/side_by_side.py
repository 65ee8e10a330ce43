"""Two servers' answers compared: where texts part, how far log-probabilities are apart, what each does by default. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Answer:
    """One server's answer. tokens, logprobs: of the output, in order; None when the server gives none. prompt_tokens,
    output_tokens: by its usage. ttft, total: seconds."""

    text: str = ""
    tokens: list[str] | None = None
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ttft: float | None = None
    total: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """Of one prompt.

    char, token: where the answers first differ, from 0; None when they do not (or tokens are not known). context: the
    texts from there on. logprob_mean, logprob_max: absolute differences over the tokens that both have in common, up to
    the first that differs; None without log-probabilities. parting_logprobs: of the two tokens that differ: close to each
    other where the model hardly preferred one.
    """

    prompt: str
    endpoint: str
    same_text: bool
    char: int | None = None
    token: int | None = None
    context: tuple[str, str] = ("", "")
    parting_logprobs: tuple[float, float] | None = None
    logprob_mean: float | None = None
    logprob_max: float | None = None
    prompt_tokens: tuple[int | None, int | None] = (None, None)
    finish_reasons: tuple[str | None, str | None] = (None, None)
    ttft: tuple[float | None, float | None] = (None, None)
    total: tuple[float | None, float | None] = (None, None)
    errors: tuple[str | None, str | None] = (None, None)

    def is_different(self, tolerance: float) -> bool:
        """Whether the servers answer differently. Times do not count."""
        if any(self.errors) or not self.same_text or self.finish_reasons[0] != self.finish_reasons[1]:
            return True
        if None not in self.prompt_tokens and self.prompt_tokens[0] != self.prompt_tokens[1]:
            return True
        return self.logprob_max is not None and self.logprob_max > tolerance


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """The first index at which two texts or lists differ, the shorter one's end included; None when they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def compare_answers(prompt: str, endpoint: str, one: Answer, other: Answer) -> PromptDifference:
    """What two answers to one prompt have in common."""
    char = first_difference(one.text, other.text)
    token = gap_mean = gap_max = parting = None
    if one.tokens is not None and other.tokens is not None:
        token = first_difference(one.tokens, other.tokens)
        if one.logprobs is not None and other.logprobs is not None:
            common = min(len(one.tokens), len(other.tokens)) if token is None else token
            gaps = [abs(a - b) for a, b in zip(one.logprobs[:common], other.logprobs[:common], strict=True)]
            if gaps:
                gap_mean, gap_max = math.fsum(gaps) / len(gaps), max(gaps)
            if token is not None and token < min(len(one.logprobs), len(other.logprobs)):
                parting = (one.logprobs[token], other.logprobs[token])
    return PromptDifference(
        prompt,
        endpoint,
        same_text=char is None,
        char=char,
        token=token,
        context=("", "") if char is None else (_from(one.text, char), _from(other.text, char)),
        parting_logprobs=parting,
        logprob_mean=gap_mean,
        logprob_max=gap_max,
        prompt_tokens=(one.prompt_tokens, other.prompt_tokens),
        finish_reasons=(one.finish_reason, other.finish_reason),
        ttft=(one.ttft, other.ttft),
        total=(one.total, other.total),
        errors=(one.error, other.error),
    )


def _from(text: str, char: int, width: int = 40) -> str:
    return text[char : char + width]


@dataclass(frozen=True, slots=True)
class Latency:
    """Medians over the prompts, and the median of the prompts' ratios, second server to first."""

    one: float
    other: float
    ratio: float
    count: int


def compare_latency(pairs: Sequence[tuple[float | None, float | None]]) -> Latency | None:
    """None when no prompt was timed on both."""
    both = [(a, b) for a, b in pairs if a is not None and b is not None and a > 0]
    if not both:
        return None
    return Latency(
        statistics.median(a for a, _ in both),
        statistics.median(b for _, b in both),
        statistics.median(b / a for a, b in both),
        len(both),
    )


@dataclass(slots=True)
class Defaults:
    """What a server does when a request says nothing. values: by name, only what could be learnt. how: for each name,
    whether it was published or found by asking."""

    values: dict[str, Any] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)

    def learn(self, name: str, value: Any, how: str) -> None:
        self.values[name] = value
        self.how[name] = how


@dataclass(frozen=True, slots=True)
class DefaultRow:
    """same: None when one of the two is not known."""

    name: str
    one: Any
    other: Any
    how: tuple[str, str]
    same: bool | None


INFORMATIVE = ("software",)  # shown, but no difference


def compare_defaults(one: Defaults, other: Defaults) -> list[DefaultRow]:
    """A row for each name that at least one knows, in the order of the first."""
    rows = []
    for name in dict.fromkeys([*one.values, *other.values]):
        known = name in one.values and name in other.values
        a, b = one.values.get(name), other.values.get(name)
        same = (True if name in INFORMATIVE else _equal(a, b)) if known else None
        rows.append(DefaultRow(name, a, b, (one.how.get(name, ""), other.how.get(name, "")), same))
    return rows


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    return bool(a == b)


def published_defaults(card: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults of a model's card, under whichever name it has them."""
    for name in ("default_sampling_params", "generation_config", "default_generation_settings"):
        value = card.get(name)
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if isinstance(item, (int, float, str, bool))}
    return {}
