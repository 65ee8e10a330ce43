"""What the reference attention backend promises beyond the conformance suite (tests/conformance)."""

from __future__ import annotations

import pytest
import torch

from hotswap.core.clock import SystemClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.attention import AttentionContext, AttentionLayer, CacheSpec
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.testing.paged_steps import make_paged_step
from hotswap.plugins.attention.torch_reference import hotswap_attention
from hotswap.plugins.attention.torch_reference.backend import TorchReferenceAttention

CONTEXTS = ((5, 5), (1, 20), (7, 16), (16, 33), (1, 1), (3, 4))  # new tokens and context length of each request


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("dim_v", [8, 5])
def test_any_block_size_and_values_of_another_size(block_size: int, dim_v: int) -> None:
    layer = AttentionLayer(0, 6, 2, 8, dim_v, 0.35, window=6, soft_cap=1.5)
    backend = TorchReferenceAttention()
    step = make_paged_step(backend.layout, layer, CONTEXTS, block_size=block_size)
    torch.testing.assert_close(step.run(backend, layer).double(), step.expected(layer), rtol=1e-5, atol=1e-5)


def test_half_precision_is_rounded_once() -> None:
    layer = AttentionLayer(0, 4, 2, 8, 8, 0.35, window=6)
    backend = TorchReferenceAttention()
    step = make_paged_step(backend.layout, layer, CONTEXTS, block_size=16, dtype=torch.bfloat16)
    torch.testing.assert_close(step.run(backend, layer).double(), step.expected(layer), rtol=2**-8, atol=1e-5)


def test_padding_rows_stay_zero() -> None:
    layer = AttentionLayer(0, 4, 2, 8, 8, 0.35)
    backend = TorchReferenceAttention()
    step = make_paged_step(backend.layout, layer, CONTEXTS, block_size=4, padding=3)
    assert not step.run(backend, layer)[-3:].any()


def test_the_provider_serves_full_and_window_caches() -> None:
    (provider,) = hotswap_attention()

    def reasons(spec: CacheSpec | None) -> list[str]:
        context = AttentionContext(
            options=None,
            config=EngineConfig.from_flat(),
            device=DeviceInfo(kind="cpu", name="test"),
            clock=SystemClock(),
            spec=spec,
        )
        return list(provider.unavailable(context))

    assert reasons(None) == []
    assert reasons(CacheSpec("full", 2, 8, 8, "float32")) == []
    assert reasons(CacheSpec("latent", 1, 8, 8, "float32")) == ["it serves full and window caches, not latent"]
