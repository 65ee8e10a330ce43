from __future__ import annotations

import pytest

from hotswap.core.errors import PlanError
from hotswap.core.kv_cache import KVCacheManager, PoolIntegrityError
from hotswap.core.request import Request
from hotswap.core.scheduling.admission import prepare_request
from hotswap.core.testing.scheduling_harness import fake_request


def computed(kv: KVCacheManager, request: Request) -> Request:
    """Admits the request with its hits and computes all that it knows."""
    kv.open_table(request, kv.match(request), request.num_known_tokens)
    request.num_computed_tokens = request.num_scheduled_tokens = request.num_known_tokens
    kv.index_computed(request)
    return request


def test_blocks_are_indexed_when_they_are_computed_not_when_they_are_allocated() -> None:
    kv = KVCacheManager(8, 4)
    first = fake_request(0, range(9))
    kv.open_table(first, [], 9)
    assert kv.match(fake_request(1, range(9))) == []
    first.num_computed_tokens = 7
    kv.index_computed(first)
    assert kv.match(fake_request(2, range(9))) == first.block_ids[:1]


def test_a_match_is_made_again_after_an_eviction() -> None:
    """D03: what an earlier look found is not believed once its block has other content."""
    kv = KVCacheManager(4, 4)
    first = computed(kv, fake_request(0, range(9)))
    waiting = fake_request(1, range(12))
    kv.release(first, after=None)
    assert len(kv.match(waiting)) == 2
    other = fake_request(2, [9] * 12)
    kv.open_table(other, [], 12)  # two plain blocks and the tail of the first one's prefix
    assert kv.match(waiting) == kv.index.match(waiting)
    assert len(kv.match(waiting)) == 1


def test_a_match_grows_with_what_others_compute() -> None:
    kv = KVCacheManager(8, 4)
    first = fake_request(0, range(12))
    kv.open_table(first, [], 12)
    waiting = fake_request(1, range(12))
    for num_computed, num_hits in ((4, 1), (8, 2), (12, 2)):
        first.num_computed_tokens = num_computed
        kv.index_computed(first)
        assert kv.match(waiting) == first.block_ids[:num_hits]


def test_new_blocks_never_evict_the_requests_own_hits() -> None:
    kv = KVCacheManager(3, 4)
    kv.release(computed(kv, fake_request(0, range(9))), after=None)
    second = fake_request(1, range(12))
    hits = kv.match(second)
    assert kv.num_blocks_to_take(hits, 12) == 3
    kv.open_table(second, hits, 12)
    assert second.block_ids[:2] == hits
    assert len(set(second.block_ids)) == 3
    kv.check_integrity([second])


def test_a_table_that_does_not_fit_takes_nothing() -> None:
    kv = KVCacheManager(3, 4)
    kv.release(computed(kv, fake_request(0, range(9))), after=None)
    second = fake_request(1, range(20))
    with pytest.raises(PlanError):
        kv.open_table(second, kv.match(second), 20)
    assert kv.pool.num_free_blocks == 3
    kv.check_integrity([])


def test_equal_content_is_never_aliased() -> None:
    kv = KVCacheManager(8, 4)
    twins = [fake_request(i, range(8)) for i in range(2)]
    for twin in twins:  # both admitted before either is computed
        kv.open_table(twin, kv.match(twin), 8)
    for twin in twins:
        twin.num_computed_tokens = 8
        kv.index_computed(twin)
    assert not set(twins[0].block_ids) & set(twins[1].block_ids)
    assert set(kv.index.blocks()) == set(twins[0].block_ids)
    kv.check_integrity(twins)


def test_a_request_that_owes_prompt_logprobs_computes_everything() -> None:
    kv = KVCacheManager(8, 4)
    computed(kv, fake_request(0, range(9)))
    asking = fake_request(1, range(9), prompt_logprobs=1)
    prepare_request(asking, 32)
    assert kv.match(asking) == []
    asking.prompt_logprobs_pending = False
    assert len(kv.match(asking)) == 2


def test_without_prefix_caching_nothing_is_indexed() -> None:
    kv = KVCacheManager(8, 4, enable_prefix_caching=False)
    request = computed(kv, fake_request(0, range(9)))
    assert len(kv.index) == 0
    assert request.block_hashes == []
    assert kv.match(fake_request(1, range(9))) == []


def test_reset_keeps_only_what_running_requests_hold() -> None:
    kv = KVCacheManager(8, 4)
    running, done = computed(kv, fake_request(0, range(9))), computed(kv, fake_request(1, [7] * 9))
    kv.release(done, after=None)
    assert not kv.reset_prefix_cache()
    assert set(kv.index.blocks()) == set(running.block_ids[:2])
    kv.release(running, after=None)
    assert kv.reset_prefix_cache()
    assert kv.pool.num_cached_free_blocks == 0
    kv.check_integrity([])


def test_waste_counts_tails_once() -> None:
    kv = KVCacheManager(16, 4)
    assert kv.waste([]) == 0.0
    first = computed(kv, fake_request(0, range(9)))  # 3 blocks, 3 slots unused
    assert kv.waste([first]) == pytest.approx(3 / 12)
    second = computed(kv, fake_request(1, range(10)))  # shares 2 blocks, 1 of its own with 2 slots unused
    assert second.block_ids[:2] == first.block_ids[:2]
    assert kv.waste([first, second]) == pytest.approx(5 / 16)
    assert kv.usage() == pytest.approx(4 / 16)
    kv.release(second, after=3)
    assert kv.waste([first]) == pytest.approx(3 / 12), "a block that is only waited for is nobody's waste"


def test_the_audit_compares_pool_and_index() -> None:
    kv = KVCacheManager(4, 4)
    request = computed(kv, fake_request(0, range(4)))
    kv.pool.set_cached(request.block_ids[0], False)
    with pytest.raises(PoolIntegrityError, match="index says True, pool says False"):
        kv.check_integrity([request])
