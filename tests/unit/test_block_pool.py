from __future__ import annotations

import pytest

from hotswap.core.errors import PlanError
from hotswap.core.kv_cache.block_pool import BlockPool, PoolIntegrityError


def test_every_block_but_the_null_block_is_handed_out_once() -> None:
    pool = BlockPool(5, 4)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free_blocks == 0
    with pytest.raises(PlanError, match="1 KV blocks asked for, 0 of 5 are free"):
        pool.allocate(1)


def test_too_large_a_request_takes_nothing() -> None:
    pool = BlockPool(3, 4)
    with pytest.raises(PlanError):
        pool.allocate(4)
    assert pool.num_free_blocks == 3
    pool.check_integrity({})


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="a pool needs blocks"):
        BlockPool(num_blocks, block_size)


def test_plain_blocks_go_first_then_the_least_recently_freed_prefix_tail_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(6, 4, on_evict=evicted.append)
    old, new = pool.allocate(2), pool.allocate(2)
    for block in old + new:
        pool.set_cached(block, True)
    pool.free(old)
    pool.free(new)
    assert not set(pool.allocate(2)) & set(old + new)
    assert evicted == []
    assert pool.allocate(4) == [old[1], old[0], new[1], new[0]]
    assert evicted == [old[1], old[0], new[1], new[0]]


def test_a_hit_takes_a_block_out_of_the_middle_of_the_eviction_order() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.set_cached(block, True)
        pool.free([block])
    pool.share([blocks[1]])
    assert pool.num_free_blocks == 2
    assert pool.allocate(2) == [blocks[0], blocks[2]]


def test_a_deferred_block_stays_in_use_until_its_step_or_a_later_one_is_complete() -> None:
    pool = BlockPool(4, 4)
    pool.free(pool.allocate(1), after=7)
    pool.free(pool.allocate(1), after=5)
    pool.free(pool.allocate(1), after=9)
    assert (pool.num_free_blocks, pool.num_deferred_references) == (1, 3)
    pool.on_step_complete(4)
    assert pool.num_free_blocks == 1
    pool.on_step_complete(7)
    assert (pool.num_free_blocks, pool.num_deferred_references) == (3, 1)
    pool.free(pool.allocate(1), after=7)  # complete already
    assert pool.num_free_blocks == 3
    pool.check_integrity({})


def test_a_deferred_block_can_be_hit_and_outlive_the_step() -> None:
    pool = BlockPool(2, 4)
    block = pool.allocate(1)
    pool.set_cached(block[0], True)
    pool.free(block, after=1)
    pool.share(block)
    assert pool.is_shared(block[0])
    pool.on_step_complete(1)
    assert not pool.is_shared(block[0])
    assert pool.num_free_blocks == 1
    pool.check_integrity({0: block})


def test_one_table_freed_late_keeps_tail_before_head() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.set_cached(block, True)
    pool.free(blocks, after=0)
    pool.on_step_complete(0)
    assert pool.allocate(3) == blocks[::-1]


def test_a_block_is_not_freed_twice_and_free_memory_is_not_shared() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(PoolIntegrityError, match="freed once too often"):
        pool.free(blocks)
    with pytest.raises(PoolIntegrityError, match="cannot be shared"):
        BlockPool(2, 4).share([1])


def test_the_audit_says_what_is_wrong() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    pool.check_integrity({1: blocks})
    with pytest.raises(PoolIntegrityError, match=f"block {blocks[0]} has reference count 1, but 0 owners"):
        pool.check_integrity({})
    with pytest.raises(PoolIntegrityError, match="but 2 owners"):
        pool.check_integrity({1: blocks, 2: blocks})
    with pytest.raises(PoolIntegrityError, match="holds a block twice"):
        pool.check_integrity({1: [blocks[0], blocks[0]]})
    with pytest.raises(PoolIntegrityError, match=r"block 0 is outside 1\.\.4"):
        pool.check_integrity({1: [*blocks, 0]})
    pool.ref_counts[blocks[0]] = 0
    with pytest.raises(PoolIntegrityError, match="0 times in the free lists"):
        pool.check_integrity({1: blocks[1:]})


def test_a_block_that_loses_its_prefix_is_plain_again() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.set_cached(blocks[0], True)
    pool.free(blocks)
    assert pool.num_cached_free_blocks == 1
    pool.set_cached(blocks[0], False)
    assert pool.num_cached_free_blocks == 0
    assert pool.num_free_blocks == 2
