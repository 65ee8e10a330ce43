"""Block dequantization for the IQ1, IQ2 and IQ3 formats: indices into code books, with signs and scales beside them.

As in gguf_dequant: uint8 [n, block_bytes] to float32 [n, 256]. A block is eight groups of 32 elements.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .gguf_code_books import code_book
from .gguf_dequant import Blocks, Dequantizer, Floats, bit_fields, half

_IQ1_DELTA = np.float32(0.125)


def _sign_table() -> Floats:
    """Seven stored bits to eight signs [128, 8]: the eighth bit makes the number of minus signs even."""
    numbers = np.arange(128, dtype=np.uint8)
    bits = np.unpackbits(numbers[:, None], axis=1, bitorder="little")
    bits[:, 7] = bits.sum(axis=1) % 2
    return 1 - 2 * bits.astype(np.float32)


_SIGNS = _sign_table()


def _words(blocks: Blocks, at: int, count: int, dtype: str) -> NDArray[np.uint32]:
    """`count` little-endian integers at byte `at`, as uint32 [n, count]."""
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(blocks[:, at : at + count * size]).view(dtype).astype(np.uint32)


def _direct_signs(data: Blocks) -> Floats:
    """One bit an element, lowest first: [n, k] -> +1 or -1 [n, k, 8]."""
    bits = np.unpackbits(np.ascontiguousarray(data), axis=1, bitorder="little").reshape(data.shape[0], -1, 8)
    return 1 - 2 * bits.astype(np.float32)


def _nibble_scales(data: Blocks) -> Floats:
    """Low then high nibble of each byte: [n, k] -> [n, 2k]."""
    n, k = data.shape
    return np.ascontiguousarray(bit_fields(data, 4).transpose(0, 2, 1)).reshape(n, 2 * k).astype(np.float32)


def _packed_signs(words: NDArray[np.uint32]) -> tuple[Floats, Floats]:
    """Per group 4 x 7 sign bits and a 4-bit scale in 32 bits: signs [n, 8, 4, 8] and scales [n, 8]."""
    fields = (words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(0x7F)
    return _SIGNS[fields], (words >> np.uint32(28)).astype(np.float32)


def iq2_xxs(blocks: Blocks) -> Floats:
    """d; per group four 8-bit indices of 8 elements, then 32 bits of signs and scale. (s + 1/2) d / 4."""
    n = blocks.shape[0]
    words = _words(blocks, 2, 16, "<u4").reshape(n, 8, 2)
    signs, scales = _packed_signs(words[:, :, 1])
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8).reshape(n, 8, 4)
    scale = half(blocks, 0) * (scales + np.float32(0.5)) * np.float32(0.25)
    values: Floats = code_book("IQ2_XXS")[indices] * signs * scale[:, :, None, None]
    return values.reshape(n, 256)


def iq2_xs(blocks: Blocks) -> Floats:
    """d; 32 words of a 9-bit index and 7 sign bits; a 4-bit scale for each 16 elements. (s + 1/2) d / 4."""
    n = blocks.shape[0]
    words = _words(blocks, 2, 32, "<u2")
    values: Floats = code_book("IQ2_XS")[words & np.uint32(511)] * _SIGNS[words >> np.uint32(9)]
    scale = half(blocks, 0) * (_nibble_scales(blocks[:, 66:74]) + np.float32(0.5)) * np.float32(0.25)
    out: Floats = values.reshape(n, 16, 16) * scale[:, :, None]
    return out.reshape(n, 256)


def iq2_s(blocks: Blocks) -> Floats:
    """d; 32 index bytes; 32 sign bytes; two more bits for each index; a 4-bit scale for each 16. (s + 1/2) d / 4."""
    n = blocks.shape[0]
    high = np.ascontiguousarray(bit_fields(blocks[:, 66:74], 2).transpose(0, 2, 1)).reshape(n, 32)
    indices = blocks[:, 2:34].astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8))
    values = code_book("IQ2_S")[indices] * _direct_signs(blocks[:, 34:66])
    scale = half(blocks, 0) * (_nibble_scales(blocks[:, 74:82]) + np.float32(0.5)) * np.float32(0.25)
    return (values.reshape(n, 16, 16) * scale[:, :, None]).reshape(n, 256)


def iq3_xxs(blocks: Blocks) -> Floats:
    """d; 64 indices of 4 elements; per group 32 bits of signs and scale. (s + 1/2) d / 2."""
    n = blocks.shape[0]
    signs, scales = _packed_signs(_words(blocks, 66, 8, "<u4"))
    values = code_book("IQ3_XXS")[blocks[:, 2:66]].reshape(n, 8, 4, 8)
    scale = half(blocks, 0) * (scales + np.float32(0.5)) * np.float32(0.5)
    return (values * signs * scale[:, :, None, None]).reshape(n, 256)


def iq3_s(blocks: Blocks) -> Floats:
    """d; 64 index bytes; a ninth bit for each; 32 sign bytes; a 4-bit scale for each group. (2 s + 1) d."""
    n = blocks.shape[0]
    ninth = np.unpackbits(np.ascontiguousarray(blocks[:, 66:74]), axis=1, bitorder="little").astype(np.uint16)
    indices = blocks[:, 2:66].astype(np.uint16) | (ninth << np.uint16(8))
    values = code_book("IQ3_S")[indices].reshape(n, 32, 8) * _direct_signs(blocks[:, 74:106])
    scale = half(blocks, 0) * (2 * _nibble_scales(blocks[:, 106:110]) + 1)
    return (values.reshape(n, 8, 32) * scale[:, :, None]).reshape(n, 256)


def iq1_s(blocks: Blocks) -> Floats:
    """d; 32 index bytes; per group 4 x 3 more index bits, a 3-bit scale and the sign of the shift. (2 s + 1) d."""
    n = blocks.shape[0]
    words = _words(blocks, 34, 8, "<u2")
    high = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint32)) & np.uint32(7)
    indices = blocks[:, 2:34].reshape(n, 8, 4).astype(np.uint32) | (high << np.uint32(8))
    shift = np.where(words & np.uint32(0x8000), -_IQ1_DELTA, _IQ1_DELTA)
    scale = half(blocks, 0) * (2 * ((words >> np.uint32(12)) & np.uint32(7)).astype(np.float32) + 1)
    values: Floats = code_book("IQ1")[indices] + shift[:, :, None, None]
    return (values * scale[:, :, None, None]).reshape(n, 256)


def iq1_m(blocks: Blocks) -> Floats:
    """32 index bytes; a nibble for each (3 index bits, sign of the shift); 4 words of 4 x 3-bit scales.

    The top nibbles of the words make up the float16 d. A scale holds for 16 elements: (2 s + 1) d.
    """
    n = blocks.shape[0]
    words = _words(blocks, 48, 4, "<u2")
    bits = ((words >> np.uint32(12)) << np.array([0, 4, 8, 12], np.uint32)).sum(axis=1).astype(np.uint16)
    d = bits.view(np.float16).astype(np.float32)[:, None]
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint32)) & np.uint32(7)
    scale = d * (2 * scales.reshape(n, 16).astype(np.float32) + 1)
    nibbles = np.ascontiguousarray(bit_fields(blocks[:, 32:48], 4).transpose(0, 2, 1)).reshape(n, 32)
    indices = blocks[:, :32].astype(np.uint16) | ((nibbles & np.uint8(7)).astype(np.uint16) << np.uint16(8))
    shift = np.where(nibbles & np.uint8(8), -_IQ1_DELTA, _IQ1_DELTA)
    values = (code_book("IQ1")[indices] + shift[:, :, None]).reshape(n, 16, 16)
    values *= scale[:, :, None]
    out: Floats = values.reshape(n, 256)
    return out


IQ_DEQUANTIZERS: dict[str, Dequantizer] = {
    "IQ1_S": iq1_s,
    "IQ1_M": iq1_m,
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ2_S": iq2_s,
    "IQ3_XXS": iq3_xxs,
    "IQ3_S": iq3_s,
}
