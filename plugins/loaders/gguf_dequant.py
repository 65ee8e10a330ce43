"""Block dequantization for GGUF, vectorised over blocks.

Each function takes the stored bytes as uint8 [n, block_bytes] and returns float32 [n, block_elements]. The formats are
ggml's. Fields of a block are named in the comments as they lie in memory; `d` is a float16 scale, `m` a float16
minimum. A K-quant super-block is 256 elements in eight groups of 32 or sixteen of 16.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.uint8]
Floats = NDArray[np.float32]
Dequantizer = Callable[[Blocks], Floats]

_F4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # E2M1, doubled
_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def half(blocks: Blocks, at: int, count: int = 1) -> Floats:
    """float16 fields at byte `at` as float32 [n, count]."""
    return np.ascontiguousarray(blocks[:, at : at + 2 * count]).view(np.float16).astype(np.float32)


def bit_fields(data: Blocks, width: int) -> Blocks:
    """Splits bytes into fields, lowest first: [n, k] -> [n, 8 / width, k]; row f holds field f of every byte."""
    mask = np.uint8((1 << width) - 1)
    out = np.empty((data.shape[0], 8 // width, data.shape[1]), np.uint8)
    for field in range(8 // width):
        np.right_shift(data, np.uint8(field * width), out=out[:, field])
    return np.bitwise_and(out, mask, out=out)


def _nibbles(data: Blocks, run: int) -> Blocks:
    """Low nibbles of `run` bytes, then their high nibbles, and so on: [n, k] -> [n, 2k]."""
    n, k = data.shape
    return bit_fields(data.reshape(-1, run), 4).reshape(n, 2 * k)


def _fifth_bits(data: Blocks) -> Blocks:
    """32 little-endian bits [n, 4] -> [n, 32], each 0 or 16."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def f64(blocks: Blocks) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float64).astype(np.float32)


def q4_0(blocks: Blocks) -> Floats:
    """d, 16 bytes of nibbles. (q - 8) d."""
    values = _nibbles(blocks[:, 2:18], 16).astype(np.float32)
    values -= 8
    values *= half(blocks, 0)
    return values


def q4_1(blocks: Blocks) -> Floats:
    """d, m, 16 bytes of nibbles. q d + m."""
    values = _nibbles(blocks[:, 4:20], 16).astype(np.float32)
    values *= half(blocks, 0)
    values += half(blocks, 2)
    return values


def q5_0(blocks: Blocks) -> Floats:
    """d, 32 fifth bits, 16 bytes of nibbles. (q - 16) d."""
    values = (_nibbles(blocks[:, 6:22], 16) | _fifth_bits(blocks[:, 2:6])).astype(np.float32)
    values -= 16
    values *= half(blocks, 0)
    return values


def q5_1(blocks: Blocks) -> Floats:
    """d, m, 32 fifth bits, 16 bytes of nibbles. q d + m."""
    values = (_nibbles(blocks[:, 8:24], 16) | _fifth_bits(blocks[:, 4:8])).astype(np.float32)
    values *= half(blocks, 0)
    values += half(blocks, 2)
    return values


def q8_0(blocks: Blocks) -> Floats:
    """d, 32 int8. q d."""
    values = blocks[:, 2:34].view(np.int8).astype(np.float32)
    values *= half(blocks, 0)
    return values


def q2_k(blocks: Blocks) -> Floats:
    """16 bytes (low nibble scale, high nibble minimum, of 16 elements each), 64 bytes of 2-bit fields, d, m."""
    n = blocks.shape[0]
    scales = bit_fields(blocks[:, :16], 4)
    low = half(blocks, 80) * scales[:, 0]
    minimum = half(blocks, 82) * scales[:, 1]
    values = bit_fields(blocks[:, 16:80].reshape(-1, 32), 2).reshape(n, 16, 16).astype(np.float32)
    values *= low[:, :, None]
    values -= minimum[:, :, None]
    return values.reshape(n, 256)


def q3_k(blocks: Blocks) -> Floats:
    """32 bytes of third bits, 64 bytes of 2-bit fields, sixteen 6-bit scales in 12 bytes, d. (q - 4) (s - 32) d."""
    n = blocks.shape[0]
    third = bit_fields(blocks[:, :32], 1).reshape(n, 256)
    values = bit_fields(blocks[:, 32:96].reshape(-1, 32), 2).reshape(n, 256) | (third << np.uint8(2))
    packed = blocks[:, 96:108]
    low = _nibbles(packed[:, :8], 8)  # scales 0..7, 8..15: their low four bits
    high = bit_fields(packed[:, 8:12], 2).reshape(n, 16)
    scales = (low | (high << np.uint8(4))).astype(np.float32) - 32
    scales *= half(blocks, 108)
    out = values.reshape(n, 16, 16).astype(np.float32) - 4
    return (out * scales[:, :, None]).reshape(n, 256)


def _scales_and_minimums(blocks: Blocks) -> tuple[Floats, Floats]:
    """Q4_K and Q5_K: d, m, then eight 6-bit scales and eight 6-bit minimums in 12 bytes -> two float32 [n, 8, 1].

    Bytes 0-3 hold scales 0-3, bytes 4-7 minimums 0-3, in their low six bits; bytes 8-11 the low nibbles of scales and
    minimums 4-7, whose top two bits are the top bits of bytes 0-7.
    """
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    six, two = np.uint8(0x3F), np.uint8(6)
    scales = np.concatenate([first & six, (third & np.uint8(0x0F)) | ((first >> two) << np.uint8(4))], axis=1)
    minimums = np.concatenate([second & six, (third >> np.uint8(4)) | ((second >> two) << np.uint8(4))], axis=1)
    return (half(blocks, 0) * scales)[:, :, None], (half(blocks, 2) * minimums)[:, :, None]


def q4_k(blocks: Blocks) -> Floats:
    """d, m, packed scales and minimums, 128 bytes of nibbles in runs of 32."""
    n = blocks.shape[0]
    scales, minimums = _scales_and_minimums(blocks)
    values = _nibbles(blocks[:, 16:144], 32).reshape(n, 8, 32).astype(np.float32)
    return (values * scales - minimums).reshape(n, 256)


def q5_k(blocks: Blocks) -> Floats:
    """As Q4_K, with 32 bytes of fifth bits (bit g of byte j: element j of group g) before the nibbles."""
    n = blocks.shape[0]
    scales, minimums = _scales_and_minimums(blocks)
    fifth = bit_fields(blocks[:, 16:48], 1).reshape(n, 256) << np.uint8(4)
    values = (_nibbles(blocks[:, 48:176], 32) | fifth).reshape(n, 8, 32).astype(np.float32)
    return (values * scales - minimums).reshape(n, 256)


def q6_k(blocks: Blocks) -> Floats:
    """128 bytes of low nibbles in runs of 64, 64 bytes of 2-bit fields in runs of 32, sixteen int8 scales, d.

    (q - 32) s d.
    """
    n = blocks.shape[0]
    low = _nibbles(blocks[:, :128], 64)
    high = bit_fields(blocks[:, 128:192].reshape(-1, 32), 2).reshape(n, 256)
    values = (low | (high << np.uint8(4))).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * half(blocks, 208)
    return (values.reshape(n, 16, 16) * scales[:, :, None]).reshape(n, 256)


def iq4_nl(blocks: Blocks) -> Floats:
    """d, 16 bytes of nibbles that index a table of 16 values."""
    values: Floats = _NL_VALUES[_nibbles(blocks[:, 2:18], 16)]
    return values * half(blocks, 0)


def iq4_xs(blocks: Blocks) -> Floats:
    """d, eight 2-bit scale tops in 2 bytes, eight low nibbles in 4 bytes, 128 bytes of table indices. (s - 32) d."""
    n = blocks.shape[0]
    high = np.ascontiguousarray(bit_fields(blocks[:, 2:4], 2).transpose(0, 2, 1)).reshape(n, 8)
    low = np.ascontiguousarray(bit_fields(blocks[:, 4:8], 4).transpose(0, 2, 1)).reshape(n, 8)
    scales = (low | (high << np.uint8(4))).astype(np.float32) - 32
    scales *= half(blocks, 0)
    values = _NL_VALUES[_nibbles(blocks[:, 8:136], 16)].reshape(n, 8, 32)
    return (values * scales[:, :, None]).reshape(n, 256)


def _ternary(data: Blocks, digits: int) -> Blocks:
    """Base-3 digits of bytes that hold a fraction of 256: [n, k] -> [n, digits, k], each 0, 1 or 2."""
    out = np.empty((data.shape[0], digits, data.shape[1]), np.uint8)
    for digit in range(digits):
        shifted = data * np.uint8(3**digit)  # wraps: the digits before are dropped
        out[:, digit] = (shifted.astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    return out


def tq1_0(blocks: Blocks) -> Floats:
    """32 + 16 bytes of five base-3 digits, 4 bytes of four, d. (q - 1) d."""
    n = blocks.shape[0]
    parts = [_ternary(blocks[:, :32], 5), _ternary(blocks[:, 32:48], 5), _ternary(blocks[:, 48:52], 4)]
    values = np.concatenate([part.reshape(n, -1) for part in parts], axis=1).astype(np.float32)
    return (values - 1) * half(blocks, 52)


def tq2_0(blocks: Blocks) -> Floats:
    """64 bytes of 2-bit fields in runs of 32, d. (q - 1) d."""
    values = bit_fields(blocks[:, :64].reshape(-1, 32), 2).reshape(-1, 256).astype(np.float32)
    return (values - 1) * half(blocks, 64)


def mxfp4(blocks: Blocks) -> Floats:
    """A power-of-two scale (biased by 127), 16 bytes of E2M1 indices. The table is doubled, so the scale is halved."""
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float32)
    return _F4_VALUES[_nibbles(blocks[:, 1:17], 16)] * scale


DEQUANTIZERS: dict[str, Dequantizer] = {
    "F64": f64,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "TQ1_0": tq1_0,
    "TQ2_0": tq2_0,
    "MXFP4": mxfp4,
}
