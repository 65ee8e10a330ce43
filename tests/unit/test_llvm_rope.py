"""CPU rotary embedding and cache writes against plain torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hotswap.core.layers.jit import host_target
from hotswap.core.layers.jit import rope_write_kv as module
from hotswap.core.layers.jit.rope_write_kv import rope_write_kv, rotary_embedding, write_kv

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(positions: int, rotated: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, rotated, 2).double() / rotated)
    phase = torch.arange(positions).double()[:, None] * frequencies
    return torch.cat([phase.cos(), phase.sin()], dim=1).float()


def rotated(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    half = cos_sin.shape[1] // 2
    cosine, sine = cos_sin[positions].double()[:, None].chunk(2, -1)
    wide = x.double()
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine, rest], -1).to(x.dtype)


def caches(blocks: int, heads: int, d: int, block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((blocks, heads, d, block_size), 9.0, dtype=dtype), torch.full(
        (blocks, heads, block_size, d), 9.0, dtype=dtype
    )


def views(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As [block, token, head, dim]."""
    return key_cache.permute(0, 3, 1, 2), value_cache.permute(0, 2, 1, 3)


def split(qkv: torch.Tensor, heads: int, kv_heads: int, d: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The views of a fused projection that its q, k and v are."""
    q, k, v = qkv.view(len(qkv), -1, d).split_with_sizes((heads, kv_heads, kv_heads), 1)
    return q, k, v


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-6 if actual.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "r", "block_size"), [(9, 3, 64, 64, 16), (2, 2, 24, 10, 4), (4, 1, 5, 4, 12)]
)
def test_rope_write_kv(
    dtype: torch.dtype, cache_dtype: torch.dtype, heads: int, kv_heads: int, d: int, r: int, block_size: int
) -> None:
    tokens = 13
    qkv = random(tokens, (heads + 2 * kv_heads) * d, dtype=dtype)
    q, k, v = split(qkv, heads, kv_heads, d)
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(1))
    cos_sin = angles(50, r)
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(2))[:tokens] + block_size
    slots[[3, 7]] = -1
    expected_q, expected_k, values = rotated(q, positions, cos_sin), rotated(k, positions, cos_sin), v.clone()
    key_cache, value_cache = caches(6, kv_heads, d, block_size, cache_dtype)
    again = qkv.clone()
    keys_again, values_again = torch.full((2, 6, block_size, kv_heads, d), 9.0, dtype=cache_dtype)  # tokens first
    rope_write_kv(q, k, v, positions, cos_sin, *views(key_cache, value_cache), slots)
    assert_close(q, expected_q)
    assert_close(k, expected_k)
    assert torch.equal(v, values)
    written = torch.zeros(6 * block_size, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            written[slot] = True
            block, offset = divmod(slot, block_size)
            assert torch.equal(key_cache[block, :, :, offset], k[token].to(cache_dtype))
            assert torch.equal(value_cache[block, :, offset], v[token].to(cache_dtype))
    untouched = ~written.view(6, 1, 1, block_size).expand_as(key_cache)
    assert (key_cache[untouched] == 9).all() and (value_cache.transpose(2, 3)[untouched] == 9).all()
    rope_write_kv(*split(again, heads, kv_heads, d), positions, cos_sin, keys_again, values_again, slots)
    keys, values = views(key_cache, value_cache)
    assert torch.equal(again, qkv) and torch.equal(keys_again, keys) and torch.equal(values_again, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_two_halves_alone(dtype: torch.dtype) -> None:
    q, k, v = (random(200, h, 64, seed=h, dtype=dtype) for h in (9, 3, 4))
    v = v[:, :3]
    positions, cos_sin = torch.arange(200), angles(200, 64)
    key_cache, value_cache = caches(20, 3, 64, 16, dtype)
    expected_q, expected_k = rotated(q, positions, cos_sin), rotated(k, positions, cos_sin)
    unrotated = k.clone()
    write_kv(k, v, key_cache, value_cache, positions + 16)
    assert torch.equal(k, unrotated)
    assert torch.equal(key_cache[1:13].permute(0, 3, 1, 2).reshape(192, 3, 64), k[:192])
    assert torch.equal(value_cache[1:13].permute(0, 2, 1, 3).reshape(192, 3, 64), v[:192])
    rotary_embedding(q, k, positions, cos_sin)
    assert_close(q, expected_q)
    assert_close(k, expected_k)


def test_bits_do_not_depend_on_threads_or_batch() -> None:
    qkv = random(150, 15 * 64, dtype=torch.bfloat16)
    positions, slots, cos_sin = torch.arange(150) % 37, torch.arange(150) + 16, angles(40, 64)
    results = []
    for threads, pieces in ((1, [150]), (2, [150]), (2, [1, 60, 89])):
        copy, (key_cache, value_cache) = qkv.clone(), caches(12, 3, 64, 16, torch.bfloat16)
        cache, end = views(key_cache, value_cache), 0
        for size in pieces:
            part = slice(end, end + size)
            rope_write_kv(*split(copy[part], 9, 3, 64), positions[part], cos_sin, *cache, slots[part], threads=threads)
            end += size
        results.append((copy, key_cache, value_cache))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_without_rotation_only_the_cache_changes() -> None:
    qkv = random(3, 5 * 8)
    before = qkv.clone()
    key_cache, value_cache = caches(2, 1, 8, 4, torch.float32)
    rope_write_kv(*split(qkv, 3, 1, 8), torch.arange(3), None, *views(key_cache, value_cache), torch.arange(3) + 4)
    assert torch.equal(qkv, before)
    assert torch.equal(key_cache[1, 0, :, :3].t(), qkv[:, 24:32]) and torch.equal(value_cache[1, 0, :3], qkv[:, 32:])


def test_values_of_another_size_than_keys() -> None:
    q, k, v = random(3, 4, 24), random(3, 2, 24, seed=1), random(3, 2, 40, seed=2)
    keys, values = torch.zeros(2, 4, 2, 24), torch.zeros(2, 4, 2, 40)
    rope_write_kv(q, k, v, torch.arange(3), angles(4, 24), keys, values, torch.arange(3) + 4)
    assert torch.equal(keys[1, :3], k) and torch.equal(values[1, :3], v)
    assert not keys[0].any() and not values[0].any()


@pytest.mark.parametrize("width", [4, 16])
def test_other_vector_shapes(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    target = dataclasses.replace(host_target(), width=width)
    monkeypatch.setattr(module, "host_target", lambda: target)
    q, k = random(4, 3, 72), random(4, 1, 72, seed=1)
    positions, cos_sin = torch.arange(4), angles(4, 72)
    expected = rotated(q, positions, cos_sin), rotated(k, positions, cos_sin)
    rotary_embedding(q, k, positions, cos_sin)
    assert_close(q, expected[0])
    assert_close(k, expected[1])


def test_wrong_arguments_are_named() -> None:
    q, k, v = random(2, 4, 8), random(2, 2, 8), random(2, 2, 8)
    positions, cos_sin, slots = torch.arange(2), angles(4, 8), torch.arange(2)
    key_cache, value_cache = caches(2, 2, 8, 4, torch.float32)
    keys, values = views(key_cache, value_cache)
    with pytest.raises(ValueError, match="positions must be contiguous int64"):
        rope_write_kv(q, k, v, positions.int(), cos_sin, keys, values, slots)
    with pytest.raises(ValueError, match="slot_mapping"):
        rope_write_kv(q, k, v, positions, cos_sin, keys, values, slots[:1])
    with pytest.raises(ValueError, match="KV cache is"):
        write_kv(k, v, key_cache, key_cache, slots)
    with pytest.raises(ValueError, match="are no cache of one dtype"):
        rope_write_kv(q, k, v, positions, cos_sin, keys, values.bfloat16(), slots)
    with pytest.raises(ValueError, match="are no cache of one dtype"):
        rope_write_kv(q, k, v, positions, cos_sin, keys, values[:, :3], slots)
    with pytest.raises(ValueError, match="holds 2 heads"):
        rope_write_kv(q, k[:, :1], v[:, :1], positions, cos_sin, keys, values, slots)
    with pytest.raises(ValueError, match="holds 2 heads"):
        rope_write_kv(q, k, v[:, :1], positions, cos_sin, keys, values, slots)
    with pytest.raises(ValueError, match="heads of q have 6 elements"):
        rope_write_kv(random(2, 4, 6), k, v, positions, cos_sin, keys, values, slots)
    with pytest.raises(ValueError, match="cos_sin"):
        rope_write_kv(q, k, v, positions, cos_sin.double(), keys, values, slots)
    with pytest.raises(ValueError, match="does not go with"):
        rope_write_kv(q, k, v.bfloat16(), positions, cos_sin, keys, values, slots)
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        rope_write_kv(q, k, v, positions, cos_sin, keys.half(), values.half(), slots)
