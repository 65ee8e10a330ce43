"""The random number of a token: a function of (request seed, position) and of nothing else (design.md, "One noise").

A counter-based hash, so there is no generator whose state a batch could disturb: the same on every device, in any
batch, with and without speculation, after a preemption. Two rounds of the SplitMix64 finalizer (Steele, Lea, Flood:
"Fast splittable pseudorandom number generators", OOPSLA 2014): the first spreads the seed over 64 bits, the second a
step of the Weyl sequence that starts there.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit constant."""
    return value - 2**64 if value >= 2**63 else value


_WEYL = _signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift: torch's `>>` on int64 copies the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer, a bijection of 64-bit words. Products wrap modulo 2**64."""
    bits = (bits ^ _shift_right(bits, 30)) * _MULTIPLY_1
    bits = (bits ^ _shift_right(bits, 27)) * _MULTIPLY_2
    return bits ^ _shift_right(bits, 31)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds int64 [S] (any value), positions int64 [S] (index of the token to draw) -> float64 [S] in [0, 1), multiples
    of 2**-53."""
    bits = _mix(_mix(seeds + _WEYL) + (positions + 1) * _WEYL)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53
