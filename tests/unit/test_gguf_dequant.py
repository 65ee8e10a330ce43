"""Every storage type against the gguf package's own dequantization, on random bytes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from hotswap.plugins.loaders.gguf_container import TENSOR_TYPES
from hotswap.plugins.loaders.gguf_dequant import DEQUANTIZERS
from hotswap.plugins.loaders.gguf_dequant_iq import IQ_DEQUANTIZERS

ALL = {**DEQUANTIZERS, **IQ_DEQUANTIZERS}
TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}


@pytest.mark.parametrize("name", sorted(set(ALL) - {"F64"}))
def test_equals_the_gguf_package(name: str) -> None:
    gguf: Any = pytest.importorskip("gguf")
    kind = TYPES[name]
    raw = np.random.default_rng(17).integers(0, 256, (97, kind.block_bytes), dtype=np.uint8)
    raw[:3] = [[0], [255], [128]]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        expected = gguf.quants.dequantize(raw.reshape(-1), gguf.GGMLQuantizationType[name]).reshape(97, -1)
        got = ALL[name](raw)
    assert got.dtype == np.float32 and got.shape == (97, kind.block_elements)
    np.testing.assert_array_equal(got, expected)


def test_f64() -> None:
    values = np.random.default_rng(1).standard_normal((5, 1))
    np.testing.assert_array_equal(ALL["F64"](values.view(np.uint8)), values.astype(np.float32))


def test_every_known_type_can_be_read_and_has_the_packages_sizes() -> None:
    gguf: Any = pytest.importorskip("gguf")
    assert set(TYPES) == set(ALL) | {"F32", "F16", "BF16"}
    for code, kind in TENSOR_TYPES.items():
        assert gguf.GGMLQuantizationType[kind.name] == code
        assert gguf.GGML_QUANT_SIZES[code] == (kind.block_elements, kind.block_bytes)
