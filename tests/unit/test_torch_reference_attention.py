"""The reference attention backend against dense attention in float64, over shuffled pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hotswap.core.clock import SystemClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.attention import AttentionContext, AttentionLayer, BatchGeometry, CacheSpec
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.plugins.attention.torch_reference import hotswap_attention
from hotswap.plugins.attention.torch_reference.backend import TorchReferenceAttention

CONTEXTS = ((5, 5), (1, 20), (7, 16), (16, 33), (1, 1), (3, 4))  # new tokens and context length of each request


class Paged:
    """Random requests whose earlier tokens are in the cache; everything else in the cache is NaN."""

    def __init__(self, layer: AttentionLayer, block_size: int, dtype: torch.dtype, padding: int = 0) -> None:
        generator = torch.Generator().manual_seed(block_size)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        heads, kv_heads = layer.num_heads, layer.num_kv_heads
        self.backend = TorchReferenceAttention()
        spec = CacheSpec("full", kv_heads, layer.head_dim_k, layer.head_dim_v, str(dtype).removeprefix("torch."))
        counts = [-(-length // block_size) for _, length in CONTEXTS]
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]
        shapes = self.backend.layout.shapes(spec, sum(counts) + 1, block_size)
        empty = [torch.full(shape, float("nan"), dtype=dtype) for shape in shapes]
        self.cache = (empty[0], empty[1])
        self.keys = [normal(length, kv_heads, layer.head_dim_k) for _, length in CONTEXTS]
        self.values = [normal(length, kv_heads, layer.head_dim_v) for _, length in CONTEXTS]
        total = sum(new for new, _ in CONTEXTS)
        self.query = normal(total + padding, heads, layer.head_dim_k)
        slots, starts = [], [0]
        for request, (new, length) in enumerate(CONTEXTS):
            for position in range(length):
                block, offset = tables[request][position // block_size], position % block_size
                if position < length - new:
                    self.cache[0][block, offset] = self.keys[request][position]
                    self.cache[1][block, offset] = self.values[request][position]
                else:
                    slots.append(block * block_size + offset)
            starts.append(len(slots))
        width = max(counts) + 1
        self.geometry = BatchGeometry(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([length for _, length in CONTEXTS], dtype=torch.int32),
            block_table=torch.tensor([row + [0] * (width - len(row)) for row in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots + [-1] * padding),
            num_tokens=total,
            num_requests=len(CONTEXTS),
            max_query_len=16,
            max_seq_len=33,
            block_size=block_size,
        )

    def new_kv(self, padding: int = 0) -> tuple[Tensor, Tensor]:
        """This step's keys and values as strided views of one tensor, as a fused projection gives them."""
        new = [
            torch.cat((key[-count:], value[-count:]), dim=2)
            for key, value, (count, _) in zip(self.keys, self.values, CONTEXTS, strict=True)
        ]
        fused = torch.cat(new)
        fused = torch.cat((fused, torch.full((padding, *fused.shape[1:]), 99.0, dtype=fused.dtype)))
        dim_k = self.keys[0].shape[2]
        return fused[..., :dim_k], fused[..., dim_k:]

    def expected(self, layer: AttentionLayer, causal: bool = True) -> Tensor:
        """Dense attention in float64."""
        rows, start = [], 0
        group = layer.num_heads // layer.num_kv_heads
        for request, (new, length) in enumerate(CONTEXTS):
            query = self.query[start : start + new].double()
            start += new
            keys = self.keys[request].double().repeat_interleave(group, 1)
            values = self.values[request].double().repeat_interleave(group, 1)
            scores = torch.einsum("qhd,nhd->hqn", query, keys) * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            for row in range(new):
                at = length - new + row
                for position in range(length):
                    out_of_window = layer.window is not None and position <= at - layer.window
                    if (causal and position > at) or out_of_window:
                        scores[:, row, position] = float("-inf")
            rows.append(torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values))
        return torch.cat(rows)


def attention_layer(heads: int = 4, kv_heads: int = 2, dim_v: int = 8, **extra: float) -> AttentionLayer:
    return AttentionLayer(0, heads, kv_heads, 8, dim_v, 0.35, **extra)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
@pytest.mark.parametrize(
    "layer",
    [
        attention_layer(),
        attention_layer(heads=3, kv_heads=3),
        attention_layer(heads=6, kv_heads=1, dim_v=5),
        attention_layer(window=6),
        attention_layer(window=1),
        attention_layer(soft_cap=1.5),
        attention_layer(window=6, soft_cap=1.5),
    ],
    ids=str,
)
def test_against_float64(layer: AttentionLayer, block_size: int) -> None:
    paged = Paged(layer, block_size, torch.float32)
    paged.backend.prepare(paged.geometry)
    paged.backend.write_kv(*paged.new_kv(), paged.cache)
    out = paged.backend.forward(paged.query, paged.cache, layer)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), paged.expected(layer), rtol=1e-5, atol=1e-5)


def test_padding_writes_nothing_and_reads_nothing() -> None:
    layer = attention_layer()
    paged = Paged(layer, 4, torch.float32, padding=3)
    paged.backend.prepare(paged.geometry)
    before = paged.cache[0].clone()
    paged.backend.write_kv(*paged.new_kv(padding=3), paged.cache)
    written = int((~paged.cache[0].isnan() & before.isnan()).any(-1).any(-1).sum())
    assert written == paged.geometry.num_tokens
    out = paged.backend.forward(paged.query, paged.cache, layer)
    torch.testing.assert_close(out[:-3].double(), paged.expected(layer), rtol=1e-5, atol=1e-5)
    assert not out[-3:].any()


def test_not_causal() -> None:
    layer = attention_layer()
    paged = Paged(layer, 4, torch.float32)
    paged.geometry.causal = False
    paged.backend.prepare(paged.geometry)
    paged.backend.write_kv(*paged.new_kv(), paged.cache)
    out = paged.backend.forward(paged.query, paged.cache, layer)
    torch.testing.assert_close(out.double(), paged.expected(layer, causal=False), rtol=1e-5, atol=1e-5)


def test_half_precision_is_rounded_once() -> None:
    layer = attention_layer(window=6)
    paged = Paged(layer, 16, torch.bfloat16)
    paged.backend.prepare(paged.geometry)
    paged.backend.write_kv(*paged.new_kv(), paged.cache)
    out = paged.backend.forward(paged.query, paged.cache, layer)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), paged.expected(layer), rtol=2**-8, atol=1e-5)


def test_blocks_that_left_the_window_may_hold_anything() -> None:
    layer = attention_layer(window=4)
    paged = Paged(layer, 4, torch.float32)
    expected = paged.expected(layer)
    for request, (new, length) in enumerate(CONTEXTS):
        for block in range((length - new - 4 + 1) // 4):
            paged.geometry.block_table[request, block] = 0  # the null block: NaN here
    paged.backend.prepare(paged.geometry)
    paged.backend.write_kv(*paged.new_kv(), paged.cache)
    out = paged.backend.forward(paged.query, paged.cache, layer)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


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
