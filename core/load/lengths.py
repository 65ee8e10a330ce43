"""Distributions of lengths, as they are written on the command line: `128`, `uniform:64,256`, `lognormal:200,0.8`, ..."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ..errors import UsageError

MAX_LENGTH = 10_000_000
FORMS = "N, uniform:LOW,HIGH, normal:MEAN,STD, lognormal:MEAN,SIGMA, exponential:MEAN or zipf:EXPONENT,MAX"


@dataclass(frozen=True, slots=True)
class Lengths:
    """`draw` gives the next length, at least 1. text: as the user wrote it."""

    text: str
    draw: Callable[[Random], int]


def parse_lengths(text: str, what: str = "length") -> Lengths:
    """uniform: every integer from LOW to HIGH alike. normal: rounded. lognormal: MEAN is the mean of the lengths (not of
    their logarithms), SIGMA the standard deviation of their logarithms. exponential: MEAN is the mean. zipf: P(k) is
    proportional to k ** -EXPONENT for k from 1 to MAX. What falls below 1 becomes 1. Raises UsageError.
    """
    name, colon, rest = text.strip().partition(":")
    try:
        numbers = [float(number) for number in (rest.split(",") if colon else [name])]
    except ValueError:
        raise UsageError(f"{what} {text!r}: not one of {FORMS}") from None
    if not all(0 <= number <= MAX_LENGTH for number in numbers):
        raise UsageError(f"{what} {text!r}: every number must be between 0 and {MAX_LENGTH}")
    makers: dict[str, tuple[int, Callable[..., Callable[[Random], float]]]] = {
        "uniform": (2, _uniform),
        "normal": (2, lambda mean, std: lambda random: random.gauss(mean, std)),
        "lognormal": (2, _lognormal),
        "exponential": (1, lambda mean: lambda random: random.expovariate(1 / mean) if mean else 0.0),
        "zipf": (2, _zipf),
    }
    if not colon:
        if numbers[0] != int(numbers[0]) or numbers[0] < 1:
            raise UsageError(f"{what} {text!r}: a whole number from 1 on is needed")
        fixed = int(numbers[0])
        return Lengths(text, lambda random: fixed)
    count, maker = makers.get(name, (0, _uniform))
    if len(numbers) != count:
        raise UsageError(f"{what} {text!r}: not one of {FORMS}")
    try:
        sample = maker(*numbers)
    except ValueError as error:
        raise UsageError(f"{what} {text!r}: {error}") from None
    return Lengths(text, lambda random: max(1, min(MAX_LENGTH, round(sample(random)))))


def _uniform(low: float, high: float) -> Callable[[Random], float]:
    if low > high or low < 1 or low != int(low) or high != int(high):
        raise ValueError("two whole numbers from 1 on, the smaller one first, are needed")
    return lambda random: random.randint(int(low), int(high))


def _lognormal(mean: float, sigma: float) -> Callable[[Random], float]:
    if mean <= 0 or sigma > 10:
        raise ValueError("MEAN must be above 0 and SIGMA, the deviation of the logarithm, at most 10")
    mu = math.log(mean) - sigma * sigma / 2
    return lambda random: math.exp(min(random.gauss(mu, sigma), 50.0))


def _zipf(exponent: float, largest: float) -> Callable[[Random], float]:
    if largest < 1 or largest != int(largest) or largest > 1_000_000:
        raise ValueError("MAX must be a whole number between 1 and 1000000")
    cumulative = list(itertools.accumulate(k**-exponent for k in range(1, int(largest) + 1)))
    return lambda random: 1 + min(bisect.bisect_right(cumulative, random.random() * cumulative[-1]), int(largest) - 1)
