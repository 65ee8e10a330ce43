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
    assert request.block_hashes == [hashlib.sha256(root + struct.pack("<4I", 5, 6, 7, 8)).digest()]
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


def computed_keys(index: PrefixIndex, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Fills with the tokens of the blocks whose keys are computed from now on."""
    computed: list[list[int]] = []
    original = index.block_key

    def noted(parent: bytes, tokens: bytes) -> bytes:
        computed.append(list(struct.unpack("<4I", tokens)))
        return original(parent, tokens)

    monkeypatch.setattr(index, "block_key", noted)
    return computed


def test_each_key_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_with([*range(17), 1, 2, 3])
    index.extend_keys(fake_request(1, [99] * 4), 1)  # the prompt before has nothing in common
    computed = computed_keys(index, monkeypatch)
    request: Request = fake_request(2, range(17))
    for _ in range(5):
        assert index.match(request) == [100, 101, 102, 103]
    request.output_token_ids += [1, 2, 3, 4]
    assert index.match(request) == [100, 101, 102, 103, 104]
    index.extend_keys(request, 5)
    assert computed == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 1, 2, 3]]


def test_a_match_computes_few_keys_beyond_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_with(list(range(16)))
    index.extend_keys(fake_request(1, [99] * 4), 1)
    computed = computed_keys(index, monkeypatch)
    assert index.match(fake_request(2, [7] * 401)) == []
    assert len(computed) == 1
    assert index.match(fake_request(3, [*range(8), *[7] * 401])) == [100, 101]
    assert len(computed) == 1 + 3
    assert PrefixIndex(4, SEED).match(fake_request(4, [7] * 401)) == []


@pytest.mark.parametrize("num_equal", range(22))
@pytest.mark.parametrize("step", [1, 2, 9])
def test_keys_taken_over_from_the_prompt_before_are_the_keys(num_equal: int, step: int) -> None:
    """However far the tokens agree, and in however many calls the keys are asked for."""
    index = PrefixIndex(4, SEED)
    index.extend_keys(fake_request(0, range(20)), 5)
    tokens = [*range(num_equal), *[50 + i for i in range(40 - num_equal)]]
    request, alone = fake_request(1, tokens), fake_request(1, tokens)
    for num_blocks in range(step, 10, step):
        index.extend_keys(request, num_blocks)
    PrefixIndex(4, SEED).extend_keys(alone, len(request.block_hashes))
    assert request.block_hashes == alone.block_hashes


def test_keys_are_taken_over_and_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    index = PrefixIndex(4, SEED)
    index.extend_keys(fake_request(0, range(40)), 10)
    computed = computed_keys(index, monkeypatch)
    for number in range(1, 5):
        index.extend_keys(fake_request(number, [*range(32), *[60 + number] * 8]), 10)
    assert len(computed) == 4 * 2


@pytest.mark.parametrize("fields", [{"cache_salt": "a"}, {"cache_salt": ""}, {"adapter_key": "digest"}])
def test_nothing_is_taken_over_under_another_salt_or_adapter(fields: dict[str, str]) -> None:
    index = PrefixIndex(4, SEED)
    index.extend_keys(fake_request(0, range(12)), 3)
    request, alone = fake_request(1, range(12), **fields), fake_request(1, range(12), **fields)  # type: ignore[arg-type]
    index.extend_keys(request, 3)
    PrefixIndex(4, SEED).extend_keys(alone, 3)
    assert request.block_hashes == alone.block_hashes


def test_unknown_tokens_have_no_key() -> None:
    with pytest.raises(struct.error):
        PrefixIndex(4, SEED).extend_keys(fake_request(0, range(7)), 2)
