"""Vector mathematics for generated code: exp, sigmoid and tanh in float32, within about 2 units in the last place.

exp: x = n ln2 + r with |r| <= ln2 / 2, and exp(r) = 1 + r + r^2 g(r), where g is our own minimax polynomial of degree 4
(relative error of exp 3.1e-9). exp(0) is exactly 1 and exp(-inf) exactly 0, on which masked attention relies.
"""

from __future__ import annotations

from .values import Val

_POLYNOMIAL = (
    0.0013814598475139512,
    0.008368716887341315,
    0.041668388048829,
    0.16666520631627274,
    0.49999993447779134,
)
_LOG2_E = 1.4426950408889634
# ln2 in two parts: the high one has so few bits that n * high is exact for every n that can occur.
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440054690582e-4
# Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
_MAGIC = 12582912.0
_LARGEST = 88.37
_SMALLEST = -87.33


def exp(x: Val) -> Val:
    """e to the x, lane by lane. Zero below -87.33 (no denormals), infinity above 88.37, NaN for NaN."""
    fn = x.fn
    lanes = x.lanes
    clamped = x.minimum(_LARGEST).maximum(_SMALLEST)
    shifted = fn.fma(clamped, fn.f32(_LOG2_E, lanes), fn.f32(_MAGIC, lanes))
    n = shifted - _MAGIC
    r = fn.fma(n, fn.f32(-_LN2_HIGH, lanes), clamped)
    r = fn.fma(n, fn.f32(-_LN2_LOW, lanes), r)
    g = fn.f32(_POLYNOMIAL[0], lanes)
    for coefficient in _POLYNOMIAL[1:]:
        g = fn.fma(g, r, fn.f32(coefficient, lanes))
    result = fn.fma(g, r * r, r) + 1.0
    # 2^n enters the exponent field; n <= 127 because _LARGEST < 127.5 ln2.
    scaled = (result.bits() + (shifted.bits() << 23)).as_float()
    scaled = x.lt(_SMALLEST).select(0.0, scaled)
    scaled = x.gt(_LARGEST).select(float("inf"), scaled)
    return x.is_nan().select(x, scaled)


def sigmoid(x: Val) -> Val:
    """1 / (1 + exp(-x)), lane by lane."""
    return 1.0 / (exp(-x) + 1.0)


def tanh(x: Val) -> Val:
    """Hyperbolic tangent, lane by lane; absolute error below 2e-7."""
    return 1.0 - 2.0 / (exp(x * 2.0) + 1.0)
