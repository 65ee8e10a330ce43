"""The pool of KV blocks: who refers to which block, which are free, and which free ones still hold a cached prefix.

    block:  0      1 .. num_blocks
            null   free, plain      ref 0, holds nothing worth keeping: handed out first, last freed first
                   free, cached     ref 0, in the prefix index: handed out (evicted) when no plain one is left,
                                    least recently freed first
                   used             ref >= 1; more than 1 means shared
A deferred free keeps its reference until the step that may still touch the block is complete, so a deferred block is a
used one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import HotswapError, PlanError

NULL_BLOCK = 0


class PoolIntegrityError(HotswapError):
    """The accounting of KV blocks is broken: a bug in the engine or in a plugin, never the fault of a request."""


class BlockPool:
    """Satisfies contracts.scheduler.PoolView. All methods run on the scheduling thread.

    num_blocks: usable blocks, ids 1..num_blocks; block 0 is the null block, for padding, and is never handed out.
    on_evict: told of a cached block that is about to be handed out for other content.
    """

    def __init__(self, num_blocks: int, block_size: int, on_evict: Callable[[int], None] | None = None) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"a pool needs blocks and tokens in them, got num_blocks={num_blocks}, block_size={block_size}"
            )
        self.ref_counts = [0] * (num_blocks + 1)
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._on_evict = on_evict
        self._plain_free = list(range(num_blocks, 0, -1))
        self._cached_free: OrderedDict[int, None] = OrderedDict()
        self._is_cached = bytearray(num_blocks + 1)
        self._deferred: dict[int, list[int]] = {}  # step id -> references to drop once it is complete
        self._last_complete_step = -1

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_free_blocks(self) -> int:
        return len(self._plain_free) + len(self._cached_free)

    @property
    def num_cached_free_blocks(self) -> int:
        return len(self._cached_free)

    @property
    def num_deferred_references(self) -> int:
        """References that drop by themselves once the steps in flight are complete; an upper bound of the blocks that
        come free.
        """
        return sum(map(len, self._deferred.values()))

    def is_shared(self, block: int) -> bool:
        """Whether a write to the block would be seen by another owner, so that it must be copied first."""
        return self.ref_counts[block] > 1

    def is_free(self, block: int) -> bool:
        return self.ref_counts[block] == 0

    def is_cached(self, block: int) -> bool:
        """Whether the block's content was said to be in the prefix index."""
        return bool(self._is_cached[block])

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises PlanError when there are fewer free ones; then nothing is
        taken.
        """
        if count > self.num_free_blocks:
            raise PlanError(f"{count} KV blocks asked for, {self.num_free_blocks} of {self._num_blocks} are free")
        num_plain = min(count, len(self._plain_free))
        blocks = self._plain_free[: -num_plain - 1 : -1]
        del self._plain_free[len(self._plain_free) - num_plain :]
        blocks += [self._evict_one() for _ in range(count - num_plain)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each; a cached free block comes back into use. Raises PoolIntegrityError on an uncached
        free one.
        """
        counts = self.ref_counts
        for block in blocks:
            count = counts[block]
            if count == 0:
                if block not in self._cached_free:
                    raise PoolIntegrityError(f"block {block} is free and holds no prefix: it cannot be shared")
                del self._cached_free[block]
            counts[block] = count + 1

    def free(self, blocks: Sequence[int], after: int | None = None) -> None:
        """Drops one reference to each of a table's blocks, given in table order.

        after: the last step in flight that may touch them; the references are held until it is complete. None: drop
            now. Within one table the tail is freed, and so evicted, before the head: a prefix outlives its extensions.
        """
        if not blocks:
            return
        if after is not None and after > self._last_complete_step:
            self._deferred.setdefault(after, []).extend(reversed(blocks))
            return
        self._drop(reversed(blocks))

    def on_step_complete(self, step_id: int) -> None:
        """Drops the references that were held for this step or an earlier one."""
        self._last_complete_step = max(self._last_complete_step, step_id)
        if self._deferred:
            for waited_for in sorted(step for step in self._deferred if step <= step_id):
                self._drop(self._deferred.pop(waited_for))

    def set_cached(self, block: int, cached: bool) -> None:
        """Says whether the block's content is in the prefix index, and so worth keeping when it is free."""
        self._is_cached[block] = cached
        if self.ref_counts[block] == 0 and not cached and block in self._cached_free:
            del self._cached_free[block]
            self._plain_free.append(block)

    def check_integrity(self, tables: Mapping[int, Sequence[int]]) -> None:
        """Audits every count against the block tables of the live requests (request id -> blocks). O(blocks).

        Raises PoolIntegrityError with every fault found.
        """
        expected: Counter[int] = Counter(block for blocks in tables.values() for block in blocks)
        expected.update(block for blocks in self._deferred.values() for block in blocks)
        free = Counter(self._plain_free)
        free.update(self._cached_free.keys())
        faults = [
            f"request {request_id} holds a block twice: {list(blocks)}"
            for request_id, blocks in tables.items()
            if len(set(blocks)) != len(blocks)
        ]
        for block in sorted(set(expected) | set(free)):
            if not 1 <= block <= self._num_blocks:
                faults.append(f"block {block} is outside 1..{self._num_blocks}")
        for block in range(1, self._num_blocks + 1):
            count = self.ref_counts[block]
            if count != expected[block]:
                faults.append(
                    f"block {block} has reference count {count}, but {expected[block]} owners (tables, deferred frees)"
                )
            if free[block] != (count == 0):
                faults.append(f"block {block} has reference count {count} and is {free[block]} times in the free lists")
            if block in self._cached_free and not self._is_cached[block]:
                faults.append(f"block {block} is kept for its prefix, but is not in the index")
        if self.ref_counts[NULL_BLOCK]:
            faults.append(f"the null block has reference count {self.ref_counts[NULL_BLOCK]}")
        if faults:
            raise PoolIntegrityError("KV block accounting is broken: " + "; ".join(faults[:20]))

    def num_blocks_only_deferred(self) -> int:
        """Used blocks that no live request refers to: they come free with the steps in flight. O(deferred)."""
        references = Counter(block for blocks in self._deferred.values() for block in blocks)
        return sum(self.ref_counts[block] == count for block, count in references.items())

    def _evict_one(self) -> int:
        block, _ = self._cached_free.popitem(last=False)
        self._is_cached[block] = False
        if self._on_evict is not None:
            self._on_evict(block)
        return block

    def _drop(self, blocks: Iterable[int]) -> None:
        """One reference to each, in this order."""
        counts = self.ref_counts
        for block in blocks:
            count = counts[block] - 1
            if count < 0 or block == NULL_BLOCK:
                raise PoolIntegrityError(f"block {block} was freed once too often")
            counts[block] = count
            if count == 0:
                if self._is_cached[block]:
                    self._cached_free[block] = None
                else:
                    self._plain_free.append(block)
