"""The noise of a token: uniform, and a function of (seed, position) alone."""

from __future__ import annotations

import torch

from hotswap.core.layers.sampling.noise import uniform

SEEDS = [0, 1, -1, 2, 12345, 2**63 - 1, -(2**63)]
WORD = 2**64


def _mix(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) % WORD
    return bits ^ (bits >> 31)


def slow_uniform(seed: int, position: int) -> float:
    """The definition in Python's unbounded integers."""
    weyl = 0x9E3779B97F4A7C15
    bits = _mix((_mix((seed + weyl) % WORD) + (position + 1) * weyl) % WORD)
    return (bits >> 11) * 2.0**-53


def _uniform(seeds: list[int], positions: list[int]) -> list[float]:
    return uniform(torch.tensor(seeds), torch.tensor(positions)).tolist()


def test_equals_the_definition_in_unbounded_integers() -> None:
    pairs = [(seed, position) for seed in SEEDS for position in (0, 1, 7, 8191, 2**31, 2**40)]
    found = _uniform([seed for seed, _ in pairs], [position for _, position in pairs])
    assert found == [slow_uniform(seed, position) for seed, position in pairs]


def test_depends_on_seed_and_position_only() -> None:
    alone = [_uniform([seed], [17])[0] for seed in SEEDS]
    together = _uniform(SEEDS[::-1] * 9, [17] * len(SEEDS) * 9)
    assert together == alone[::-1] * 9


def test_B02_seeds_0_and_1_and_extremes_differ() -> None:
    values = _uniform(SEEDS, [5] * len(SEEDS))
    assert len(set(values)) == len(SEEDS)
    assert _uniform([0, 0], [5, 5])[0] == values[0]


def test_values_are_in_the_half_open_interval() -> None:
    values = uniform(torch.zeros(200_000, dtype=torch.int64), torch.arange(200_000))
    assert values.dtype == torch.float64
    assert float(values.min()) >= 0.0 and float(values.max()) < 1.0


def _chi_square(values: torch.Tensor, bins: int) -> float:
    counts = torch.histc(values, bins, 0.0, 1.0)
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum())


def test_uniform_along_positions_and_along_seeds() -> None:
    # 256 bins: the chi-square statistic has mean 255 and deviation 22.6; six deviations never happen by chance here.
    count = torch.arange(200_000)
    for seed in (0, 1, -7):
        assert abs(_chi_square(uniform(torch.full_like(count, seed), count), 256) - 255) < 136
    for position in (0, 1, 4095):
        assert abs(_chi_square(uniform(count, torch.full_like(count, position)), 256) - 255) < 136


def test_neighbours_are_uncorrelated() -> None:
    count = torch.arange(100_000)
    zero, one = torch.zeros_like(count), torch.ones_like(count)
    for first, second in (
        (uniform(zero, count), uniform(zero, count + 1)),
        (uniform(count, zero), uniform(count + 1, zero)),
        (uniform(zero, count), uniform(one, count)),
        (uniform(count, count), uniform(count + 1, count - 1)),
    ):
        correlation = float(torch.corrcoef(torch.stack((first, second)))[0, 1])
        assert abs(correlation) < 6 / 100_000**0.5
