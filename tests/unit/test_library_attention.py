"""Attention over other people's kernels: what is made once for all layers of a step, and passes repeated as by a graph.

That the calls compute attention is shown in tests/conformance/test_builtins_attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from installed_fakes import HOPPER, installed

from hotswap.core.clock import ManualClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionLayer,
    CacheSpec,
    LayerCache,
)
from hotswap.core.testing.finding import find_provider
from hotswap.core.testing.paged_steps import PagedStep, make_paged_step
from hotswap.plugins.attention.token_major import OncePerPass, blocks_behind

FLASH_ATTN = "hotswap.plugins.attention.flash_attn"
LAYERS = [AttentionLayer(index, 4, 2, 64, 64, 0.125, window=window) for index, window in enumerate((None, 6, None, 20))]


@pytest.fixture(params=["fa2", "fa3", "fa4"])
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    name = "flash_attn_4" if request.param == "fa4" else "flash_attn"
    context = AttentionContext(
        options=None,
        config=EngineConfig(),
        device=HOPPER,
        clock=ManualClock(),
        spec=CacheSpec("full", 2, 64, 64, "bfloat16"),
        block_size=block_size(request.param),
        layers=tuple(LAYERS),
    )
    with installed(request.param):
        yield find_provider("attention", FLASH_ATTN, name).provider.build(context)


def block_size(fake: str) -> int:
    return 256 if fake == "fa2" else 16


def step_of(backend: AttentionBackend, contexts: tuple[tuple[int, int], ...], seed: int) -> PagedStep:
    size = backend.layout.block_sizes[-1] if 256 in backend.layout.block_sizes else 16
    return make_paged_step(backend.layout, LAYERS[0], contexts, block_size=size, dtype=torch.bfloat16, seed=seed)


def run_pass(backend: AttentionBackend, step: PagedStep, caches: list[LayerCache]) -> None:
    """All layers, each with a cache of its own that is filled anew, without `prepare`."""
    for layer, cache in zip(LAYERS, caches, strict=True):
        for stored, contents in zip(cache, step.cache, strict=True):
            stored[: len(contents)].copy_(contents)
        backend.write_kv(step.key, step.value, cache)
        found = backend.forward(step.query, cache, layer)
        torch.testing.assert_close(found.double(), step.expected(layer), rtol=2**-7, atol=2**-7)


def test_a_pass_repeated_over_changed_tensors_sees_them(backend: AttentionBackend) -> None:
    """A graph is recorded in a second pass after one `prepare`, and replayed over tensors that were changed in place:
    nothing of the first pass may be left in it."""
    first = step_of(backend, ((1, 40), (1, 17), (1, 61)), seed=1)
    second = step_of(backend, ((1, 63), (1, 2), (1, 49)), seed=2)
    geometry = first.geometry
    geometry.max_seq_len = 64
    blocks = max(len(first.cache[0]), len(second.cache[0]))
    shape = (blocks, *first.cache[0].shape[1:])
    caches = [(torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)) for _ in LAYERS]
    backend.prepare(geometry)
    run_pass(backend, first, caches)
    for name in ("seq_lens", "slot_mapping"):
        getattr(geometry, name).copy_(getattr(second.geometry, name))
    table = second.geometry.block_table
    if geometry.block_table.shape[1] < table.shape[1]:
        table = table[:, : geometry.block_table.shape[1]]
    geometry.block_table.zero_()
    geometry.block_table[:, : table.shape[1]].copy_(table)
    run_pass(backend, second, caches)


def test_once_per_pass() -> None:
    made: list[str] = []
    values: OncePerPass[str] = OncePerPass()

    def get(layer: int, variant: str) -> str:
        return values.get(layer, variant, lambda: made.append(variant) or f"{variant}{len(made)}")  # type: ignore[func-returns-value]

    assert [get(0, "a"), get(1, "b"), get(2, "a")] == ["a1", "b2", "a1"]
    assert [get(0, "a"), get(1, "b")] == ["a3", "b4"]  # layer 0 again: another pass
    values.clear()
    assert get(5, "a") == "a5"


@pytest.mark.parametrize(
    ("length", "new", "window", "behind"),
    [
        (48, 9, 1, 2),
        (48, 9, 8, 2),
        (48, 9, 9, 1),
        (48, 48, 1, 0),
        (32, 1, 16, 1),
        (32, 1, 17, 0),
        (33, 1, 1, 2),
        (5, 1, 100, 0),
    ],
)
def test_blocks_behind_a_window(length: int, new: int, window: int, behind: int) -> None:
    """Blocks of 16: the first query, at length - new, sees `window` tokens, itself included."""
    found = blocks_behind(torch.tensor([length]), torch.tensor([new]), window, 16)
    seen_first = max(0, length - new - window + 1)
    assert found.tolist() == [behind] == [seen_first // 16]


def test_a_decode_step_with_spare_rows(backend: AttentionBackend) -> None:
    """Version 2 takes row r for request r when all have one token: more rows than requests must not reach it that way."""
    step = step_of(backend, ((1, 40), (1, 17)), seed=3)
    spare = torch.randn(3, *step.query.shape[1:]).to(step.query.dtype)
    step = replace(step, query=torch.cat((step.query, spare)))
    backend.prepare(step.geometry)
    backend.write_kv(step.key, step.value, step.cache)
    found = backend.forward(step.query, step.cache, LAYERS[0])
    step.query = step.query[:2]
    assert len(found) == 5
    torch.testing.assert_close(found[:2].double(), step.expected(LAYERS[0]), rtol=2**-7, atol=2**-7)


def test_prepare_comes_first(backend: AttentionBackend) -> None:
    step = step_of(backend, ((1, 5),), seed=4)
    with pytest.raises(RuntimeError, match="prepare"):
        backend.forward(step.query, step.cache, LAYERS[0])
