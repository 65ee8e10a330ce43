"""The block pool against a model that keeps every reference and every free in the open."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hotswap.core.errors import PlanError
from hotswap.core.kv_cache.block_pool import BlockPool, PoolIntegrityError


class BlockPoolMachine(RuleBasedStateMachine):
    pool_class = BlockPool

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.evicted: list[int] = []
        self.pool = self.pool_class(num_blocks, 4, on_evict=self.evicted.append)
        self.tables: dict[int, list[int]] = {}
        self.deferred: dict[int, list[int]] = {}
        self.cached: set[int] = set()
        self.lru: list[int] = []  # free and cached, first to be evicted first
        self.next_table = 0
        self.last_complete = -1

    def references(self) -> Counter[int]:
        owned = Counter(block for blocks in self.tables.values() for block in blocks)
        owned.update(block for blocks in self.deferred.values() for block in blocks)
        return owned

    def drop(self, blocks: list[int]) -> None:
        """After the references are gone from the model: which blocks became free, in which order."""
        owned = self.references()
        for block in reversed(blocks):
            if owned[block] == 0 and block in self.cached and block not in self.lru:
                self.lru.append(block)

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        free = set(range(1, self.pool.num_blocks + 1)) - set(self.references())
        if count > len(free):
            with pytest.raises(PlanError):
                self.pool.allocate(count)
            return
        num_plain = len(free) - len(self.lru)
        self.evicted.clear()
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count and set(blocks) <= free
        expected = self.lru[: max(0, count - num_plain)]
        assert self.evicted == expected, "least recently freed first, and only when no plain block is left"
        del self.lru[: len(expected)]
        self.cached -= set(expected)
        assert not self.cached & set(blocks)
        self.tables[self.next_table] = blocks
        self.next_table += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share_prefix(self, data: st.DataObject) -> None:
        blocks = self.tables[data.draw(st.sampled_from(sorted(self.tables)))]
        prefix = blocks[: data.draw(st.integers(0, len(blocks)))]
        self.pool.share(prefix)
        self.tables[self.next_table] = list(prefix)
        self.next_table += 1

    @precondition(lambda self: self.lru)
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.lru))
        self.pool.share([block])
        self.lru.remove(block)
        self.tables[self.next_table] = [block]
        self.next_table += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), after=st.none() | st.integers(-1, 3))
    def free(self, data: st.DataObject, after: int | None) -> None:
        blocks = self.tables.pop(data.draw(st.sampled_from(sorted(self.tables))))
        if after is not None:
            after += self.last_complete
        self.pool.free(blocks, after)
        if after is not None and after > self.last_complete:
            self.deferred.setdefault(after, []).extend(blocks)
        else:
            self.drop(blocks)

    @rule(ahead=st.integers(1, 2))
    def complete(self, ahead: int) -> None:
        self.last_complete += ahead
        self.pool.on_step_complete(self.last_complete)
        done = sorted(step for step in self.deferred if step <= self.last_complete)
        for step in done:
            self.deferred.pop(step)
        free_now = self.cached - set(self.references())
        released = [block for block in free_now if block not in self.lru]
        # The order among blocks freed by one completion is checked in the unit tests; take the pool's.
        order = [block for block in self.pool._cached_free if block in released]
        assert sorted(order) == sorted(released)
        self.lru += order

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        blocks = self.tables[data.draw(st.sampled_from(sorted(self.tables)))]
        for block in blocks:
            self.pool.set_cached(block, True)
            self.cached.add(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached)))
        self.pool.set_cached(block, False)
        self.cached.remove(block)
        if block in self.lru:
            self.lru.remove(block)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.tables)
        owned = self.references()
        assert self.pool.num_free_blocks == self.pool.num_blocks - len(owned)
        assert [self.pool.ref_counts[b] for b in range(self.pool.num_blocks + 1)] == [
            owned[b] for b in range(self.pool.num_blocks + 1)
        ]
        assert all(self.pool.is_shared(block) == (count > 1) for block, count in owned.items())
        only_deferred = set(owned) - {block for blocks in self.tables.values() for block in blocks}
        assert self.pool.num_blocks_only_deferred() == len(only_deferred)


CHECKED = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = CHECKED


class LeakyPool(BlockPool):
    """Forgets the last block of a longer table."""

    def free(self, blocks: list[int], after: int | None = None) -> None:  # type: ignore[override]
        super().free(blocks[:-1] if len(blocks) > 2 else blocks, after)


class AliasingPool(BlockPool):
    """Counts a shared block once."""

    def share(self, blocks: list[int]) -> None:  # type: ignore[override]
        super().share([block for block in blocks if self.ref_counts[block] != 1])


class EagerPool(BlockPool):
    """Ignores that steps in flight still touch a block."""

    def free(self, blocks: list[int], after: int | None = None) -> None:  # type: ignore[override]
        super().free(blocks, None)


class HeadFirstPool(BlockPool):
    """Evicts the head of a prefix before its tail."""

    def free(self, blocks: list[int], after: int | None = None) -> None:  # type: ignore[override]
        super().free(blocks[::-1], after)


class NullPool(BlockPool):
    """Hands out the null block."""

    def __init__(self, num_blocks: int, block_size: int, on_evict: object = None) -> None:
        super().__init__(num_blocks, block_size, on_evict)  # type: ignore[arg-type]
        self._plain_free[0] = 0


@pytest.mark.parametrize("broken", [LeakyPool, AliasingPool, EagerPool, HeadFirstPool, NullPool])
def test_machine_rejects_broken_pool(broken: type[BlockPool]) -> None:
    machine = type("Machine", (BlockPoolMachine,), {"pool_class": broken})
    with pytest.raises((AssertionError, PoolIntegrityError, PlanError)):
        run_state_machine_as_test(
            machine, settings=settings(CHECKED, phases=[Phase.generate], report_multiple_bugs=False, database=None)
        )
