from __future__ import annotations

import hashlib
import struct

import pytest

from hotswap.core.kv_cache.prefix_index import PrefixIndex
from hotswap.core.request import Request
from hotswap.core.testing.scheduling_harness import fake_request

SEED = b"a seed of this test"


def index_with(prompt: list[int], **fields: object) -> PrefixIndex:
    """An index in which every full block of the prompt is computed: block i is number 100 + i."""
    index = PrefixIndex(4, SEED)
    request = fake_request(0, prompt, **fields)  # type: ignore[arg-type]
    index.extend_keys(request, len(prompt) // 4)
    for i, key in enumerate(request.block_hashes):
        assert index.insert(key, 100 + i)
    return index


@pytest.mark.parametrize(
    ("length", "num_hits"), [(1, 0), (3, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (11, 2), (12, 2), (13, 3), (16, 3)]
)
def test_the_last_token_is_never_a_hit(length: int, num_hits: int) -> None:
    index = index_with(list(range(16)))
    assert index.match(fake_request(1, range(length))) == [100, 101, 102][:num_hits]


def test_a_match_ends_at_the_first_difference() -> None:
    index = index_with(list(range(16)))
    assert index.match(fake_request(1, [0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11, 12])) == [100]
    assert index.match(fake_request(2, [99, *range(1, 13)])) == []


def test_equal_blocks_at_other_positions_are_not_equal_prefixes() -> None:
    index = index_with([1, 2, 3, 4, 1, 2, 3, 4])
    assert len(index) == 2
    assert index.match(fake_request(1, [1, 2, 3, 4, 1, 2, 3, 4, 1])) == [100, 101]


def test_known_outputs_count_across_the_end_of_the_prompt() -> None:
    index = index_with(list(range(16)))
    request = fake_request(1, range(6))
    request.output_token_ids = list(range(6, 14))
    assert index.match(request) == [100, 101, 102]


@pytest.mark.parametrize(
    ("other", "hits"),
    [
        ({"cache_salt": "a"}, True),
        ({"cache_salt": "b"}, False),
        ({"cache_salt": ""}, False),
        ({"cache_salt": "\ud800"}, False),
        ({}, False),
        ({"cache_salt": "a", "adapter_key": "digest"}, False),
    ],
)
def test_salt_and_adapter_are_part_of_every_key(other: dict[str, object], hits: bool) -> None:
    index = index_with(list(range(8)), cache_salt="a")
    assert bool(index.match(fake_request(1, range(9), **other))) == hits  # type: ignore[arg-type]


def test_no_salt_and_an_empty_salt_are_different() -> None:
    assert index_with(list(range(8))).match(fake_request(1, range(9), cache_salt="")) == []


def test_keys_are_sha256_chains_from_a_secret_seed() -> None:
    index = PrefixIndex(4, SEED)
    request = fake_request(0, [5, 6, 7, 8])
    index.extend_keys(request, 1)
    root = index.root_key("", None)
    assert request.block_hashes == [hashlib.sha256(root + struct.pack("<4q", 5, 6, 7, 8)).digest()]
    assert PrefixIndex(4, SEED).root_key("", None) == root
    assert PrefixIndex(4).root_key("", None) != PrefixIndex(4).root_key("", None)
    with pytest.raises(ValueError, match="at least 16 bytes"):
        PrefixIndex(4, b"short")


def test_the_first_block_of_a_content_is_kept() -> None:
    index = index_with(list(range(4)))
    request = fake_request(1, range(5))
    index.extend_keys(request, 1)
    assert not index.insert(request.block_hashes[0], 200)
    assert index.match(request) == [100]
    assert 200 not in index
    with pytest.raises(ValueError, match="indexed already"):
        index.insert(b"another key", 100)


def test_each_key_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    index = PrefixIndex(4, SEED)
    computed: list[list[int]] = []
    original = index.block_key

    def noted(parent: bytes, tokens: list[int]) -> bytes:
        computed.append(tokens)
        return original(parent, tokens)

    monkeypatch.setattr(index, "block_key", noted)
    request: Request = fake_request(0, range(17))
    for _ in range(5):
        index.match(request)
    request.output_token_ids += [1, 2, 3, 4]
    index.match(request)
    assert computed == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 1, 2, 3]]
