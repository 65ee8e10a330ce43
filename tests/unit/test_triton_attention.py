"""What the Triton attention backend promises beyond the conformance suite: splits, packing, launch shapes, and bits that do
not depend on the batch. Kernels run under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from hotswap.core.clock import SystemClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.attention import AttentionContext, AttentionLayer, CacheSpec
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.testing.paged_steps import PagedStep, make_paged_step
from hotswap.core.testing.triton_interpreter import repair_loops
from hotswap.plugins.attention.triton_paged import hotswap_attention
from hotswap.plugins.attention.triton_paged.tuning import (
    MAX_DECODE_TOKENS,
    MAX_SPLITS,
    SHARED_MEMORY,
    Shape,
    Sizes,
    decode_packing,
    decode_shape,
    decode_tokens,
    family_of,
    pack,
    padded,
    prefill_shape,
    shared_bytes,
    split_plan,
)

H200 = DeviceInfo(kind="cuda", name="NVIDIA H200", capability=(9, 0))
TORCH_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(step: PagedStep, layer: AttentionLayer, **options: object) -> torch.Tensor:
    pytest.importorskip("triton", reason="triton is not installed")
    repair_loops()
    from hotswap.plugins.attention.triton_paged.backend import TritonPagedAttention

    return step.run(TritonPagedAttention(H200, **options), layer).cpu()  # type: ignore[arg-type]


def make(layer: AttentionLayer, contexts: tuple[tuple[int, int], ...], **options: object) -> PagedStep:
    from hotswap.plugins.attention.triton_paged.backend import TritonPagedAttention

    pytest.importorskip("triton", reason="triton is not installed")
    options = {"block_size": 16, "device": TORCH_DEVICE, **options}
    return make_paged_step(TritonPagedAttention.layout, layer, contexts, **options)  # type: ignore[arg-type]


# Kernels.


@pytest.mark.parametrize("splits", [(3, 1), (5, 2), (16, 1)])
def test_any_split_gives_the_same_sums(splits: tuple[int, int]) -> None:
    layer = AttentionLayer(0, 2, 1, 16, 16, 0.25, window=90)
    step = make(layer, ((1, 1), (2, 60), (1, 110)))
    found = run(step, layer, splits=splits, decode=Shape(16, 16, 2, 2))
    torch.testing.assert_close(found.double(), step.expected(layer), rtol=1e-5, atol=1e-5)


def test_splits_sinks_and_slopes_together() -> None:
    by_head = torch.tensor([0.5, -1.0, 2.0, 0.25], device=TORCH_DEVICE)
    layer = AttentionLayer(0, 4, 2, 16, 16, 0.25, sinks=by_head, alibi_slopes=by_head / 8)
    step = make(layer, ((1, 90), (3, 40)))
    found = run(step, layer, splits=(4, 1), decode=Shape(16, 16, 2, 2))
    torch.testing.assert_close(found.double(), step.expected(layer), rtol=1e-5, atol=1e-5)


def test_a_draft_is_verified_by_several_programs() -> None:
    layer = AttentionLayer(0, 8, 1, 16, 16, 0.25)  # 2 tokens a program
    step = make(layer, ((3, 40), (4, 4), (1, 20)))
    found = run(step, layer)
    torch.testing.assert_close(found.double(), step.expected(layer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(40, 1)])
def test_many_heads_of_one_kv_head(heads: tuple[int, int]) -> None:
    layer = AttentionLayer(0, *heads, 16, 16, 0.25)
    step = make(layer, ((1, 20), (9, 12)))
    found = run(step, layer, prefill=Shape(16, 16, 2, 1))  # heads are dealt out to programs
    torch.testing.assert_close(found.double(), step.expected(layer), rtol=1e-5, atol=1e-5)


def test_rows_and_tokens_of_padding_are_left_alone() -> None:
    """As in a graph: rows without tokens whose length is anything, and tokens that no row owns."""
    layer = AttentionLayer(0, 2, 1, 16, 16, 0.25)
    step = make(layer, ((1, 20), (11, 11)), padding=4)
    expected, geometry = step.expected(layer), step.geometry
    end = geometry.query_start_loc[-1:]
    geometry.query_start_loc = torch.cat((geometry.query_start_loc, end, end))
    geometry.seq_lens = torch.cat((geometry.seq_lens, geometry.seq_lens.new_tensor([0, 900])))
    geometry.block_table = torch.cat((geometry.block_table, torch.zeros_like(geometry.block_table)))
    geometry.num_requests, geometry.max_query_len, geometry.max_seq_len = 4, 16, 4096
    found = run(step, layer)
    torch.testing.assert_close(found[:12].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_deterministic_bits_depend_on_the_context_alone(soft_cap: float | None) -> None:
    """The last token's output is the same, alone or in a batch, in one chunk or another, padded or not.

    Without a GPU the chunks are such that the token is the same row of a tile: numpy's products of two rows may differ.
    """
    layer = AttentionLayer(0, 2, 1, 16, 16, 0.25, soft_cap=soft_cap)
    whole = make(layer, ((70, 70), (1, 90)), padding=3)
    bits = run(whole, layer, deterministic=True)[69]
    for new in (1, 2, 33) if TORCH_DEVICE == "cuda" else (6, 22, 38):
        step = whole.alone(0)
        step.contexts = ((new, 70),)
        rows = slice(70 - new, 70)
        step.query, step.key, step.value = step.query[rows], step.key[rows], step.value[rows]
        geometry = step.geometry
        geometry.query_start_loc = torch.tensor([0, new], dtype=torch.int32, device=TORCH_DEVICE)
        geometry.slot_mapping = geometry.slot_mapping[rows]
        geometry.num_tokens = geometry.max_query_len = new
        assert torch.equal(run(step, layer, deterministic=True)[-1], bits), new


# Tables.


@pytest.mark.parametrize("size", [8, 16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("family", SHARED_MEMORY)
def test_every_shape_fits_its_card(family: str, size: int) -> None:
    for item, cache_item in ((2, 2), (4, 4), (2, 1)):
        sizes = Sizes(family, padded(size), padded(size), item, cache_item)
        shapes = [prefill_shape(sizes), prefill_shape(sizes, deterministic=True)]
        shapes += [decode_shape(sizes, rows) for rows in (16, 32, 64)]
        for shape in shapes:
            assert shared_bytes(shape, sizes) <= SHARED_MEMORY[family]
            assert shape.rows >= 16 and shape.block_n >= 16 and shape.stages >= 1


def test_families() -> None:
    assert family_of("cuda", (9, 0)) == family_of("cuda", (10, 0)) == "hopper"
    assert family_of("cuda", (8, 0)) == "ampere"
    assert family_of("cuda", (8, 9)) == family_of("cuda", (12, 0)) == "consumer"
    assert family_of("cuda", (7, 5)) == "old"
    assert family_of("rocm", (9, 4)) == "rocm"


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 28, 48, 71, 128])
def test_packing_holds_each_head_once(group: int) -> None:
    for rows in (16, 64, 128):
        packing = pack(group, rows)
        assert packing.heads * packing.tokens <= rows
        assert packing.heads * (packing.parts - 1) < group <= packing.heads * packing.parts
        assert group * packing.tokens / (packing.parts * rows) > 0.7
    rows, packing = decode_packing(group)
    assert packing.heads * packing.tokens <= rows <= 64
    assert packing.heads * (packing.parts - 1) < group <= packing.heads * packing.parts
    assert 1 <= decode_tokens(packing) <= MAX_DECODE_TOKENS


def test_few_programs_are_split_until_they_fill_the_card() -> None:
    splits, min_tiles = split_plan(8, 132, 500)  # batch 1, 8 KV heads, 32,000 tokens
    assert 132 <= 8 * splits <= 3 * 132 and min_tiles == 1
    assert split_plan(8, 132, 9) == (9, 1)  # no more splits than tiles
    assert split_plan(2048, 132, 125)[0] == 1  # batch 256 fills the card by itself
    for programs in (1, 3, 8, 24, 64, 100, 256, 512, 5000):
        splits, min_tiles = split_plan(programs, 132, 10_000)
        assert 1 <= splits <= MAX_SPLITS and min_tiles >= 1


def test_what_it_refuses() -> None:
    (provider,) = hotswap_attention()

    def reasons(spec: CacheSpec | None, **device: object) -> list[str]:
        context = AttentionContext(
            options=None,
            config=EngineConfig.from_flat(),
            device=DeviceInfo(**{"kind": "cuda", "name": "a card", "capability": (9, 0), **device}),  # type: ignore[arg-type]
            clock=SystemClock(),
            spec=spec,
        )
        return [text for text in provider.unavailable(context) if "not installed" not in text]

    assert reasons(None) == []
    assert reasons(None, kind="cpu") == ["it makes code for GPUs, the device is cpu"]
    assert reasons(CacheSpec("window", 2, 96, 96, "bfloat16", 64)) == []
    assert "multiples of 8" in reasons(CacheSpec("full", 2, 100, 100, "float16"))[0]
    assert "not latent" in reasons(CacheSpec("latent", 1, 64, 64, "float32"))[0]
    assert "--dtype float16" in reasons(CacheSpec("full", 2, 64, 64, "bfloat16"), capability=(7, 5))[0]
    assert "8.9" in reasons(CacheSpec("full", 2, 64, 64, "float8_e4m3fn"), capability=(8, 0))[0]
    assert reasons(CacheSpec("full", 2, 64, 64, "float16"), kind="rocm", capability=(9, 4)) == []
