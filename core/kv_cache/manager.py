"""Block tables of requests: grown, matched against the prefix index, released. The only code that touches pool and
index together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import PlanError
from ..request import Request
from .block_pool import BlockPool, PoolIntegrityError
from .pending import PendingBlocks
from .prefix_index import PrefixIndex


class _Match(NamedTuple):
    """What a request hit when it was looked at last, and what the index had seen by then.

    keys: the request's own list, which says whose match it is; an id may come again.
    """

    keys: list[bytes]
    num_evictions: int
    num_insertions: int
    num_known: int
    blocks: list[int]


class Awaited(NamedTuple):
    """Blocks that a request lacks next and that are being computed for others. key: the last one's. num_tokens: in all."""

    key: bytes
    num_tokens: int


class KVCacheManager:
    """One cache group (all layers cache alike); plans carry a list per group, so that more can come.

    num_blocks: usable blocks, without the null block. prefix_seed: see PrefixIndex.
    """

    num_groups = 1

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, prefix_seed: bytes | None = None
    ) -> None:
        self.enable_prefix_caching = enable_prefix_caching
        self.block_size = block_size
        self.index = PrefixIndex(block_size, prefix_seed)
        self.pending = PendingBlocks()
        self.pool = BlockPool(num_blocks, block_size, on_evict=self.index.remove)
        self._unannounced: dict[int, Request] = {}  # requests that have something to announce
        self._first_unannounced: set[bytes] = set()  # keys, see announce
        self._last_match = _Match([], 0, 0, 0, [])

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_match(self, request: Request) -> bool:
        """Whether the request may use cached prefixes. One that owes prompt log-probabilities computes every
        position.
        """
        return self.enable_prefix_caching and not request.prompt_logprobs_pending

    def hint(self, request: Request) -> int:
        """Tokens that a prefix hit would save now, for policies to look at."""
        return len(self.match(request)) * self.block_size if self.can_match(request) else 0

    def renewed_hint(self, request: Request) -> int:
        """As `hint`, from the one that the request has: while its last block is cached, those before it are taken to be, since
        a prefix is evicted from its end. So what has not changed costs a look-up or two, however long it is.
        """
        known = request.num_cached_prompt_tokens // self.block_size
        keys = request.block_hashes
        if not 0 < known <= len(keys) or not self.can_match(request) or not self.index.has(keys[known - 1]):
            return self.hint(request)
        return (known + len(self.index.match(request, start=known))) * self.block_size

    def match(self, request: Request) -> list[int]:
        """Blocks of the request's longest cached prefix, not yet referenced: valid until the pool is next allocated
        from.

        Asked every step for the request at the head of the queue, and one after the other for those that share a prefix:
        only what is new since the last time is looked up.
        """
        if not self.can_match(request):
            return []
        last, index, num_known = self._last_match, self.index, request.num_known_tokens
        blocks = last.blocks
        if last.num_evictions != index.num_evictions:
            blocks = []
        elif last.keys is not request.block_hashes:
            count = min(len(blocks), (num_known - 1) // self.block_size)
            blocks = blocks[:count] if last.keys[:count] == request.block_hashes[:count] else []
        elif last.num_insertions == index.num_insertions and last.num_known == num_known:
            return blocks
        blocks = blocks + index.match(request, start=len(blocks))
        self._last_match = _Match(request.block_hashes, index.num_evictions, index.num_insertions, num_known, blocks)
        return blocks

    def awaited(self, request: Request) -> Awaited | None:
        """What others are computing for the request; None when nobody computes the block that it lacks next."""
        if not (len(self.pending) or self._unannounced) or not self.can_match(request):
            return None
        start, limit = len(self.match(request)), (request.num_known_tokens - 1) // self.block_size
        if start >= limit:
            return None
        self.index.extend_keys(request, start + 1)
        key = request.block_hashes[start]
        if not self.pending.is_pending(key) and key not in self._first_unannounced:
            return None
        self.announce_scheduled()
        self.index.extend_keys(request, limit)
        count = self.pending.num_pending(request.block_hashes, start, limit)
        return Awaited(request.block_hashes[start + count - 1], count * self.block_size) if count else None

    def announce(self, request: Request) -> None:
        """Full blocks among the known tokens that are scheduled so far count as being computed.

        For now the key of the first that the index lacks is enough: only whoever lacks that block too could wait for any of
        them, as long as nothing is indexed. The others are made by `announce_scheduled`.
        """
        place, full = self._to_announce(request)
        if place >= full or not self.enable_prefix_caching:
            return
        self._unannounced[request.request_id] = request
        while place < full:
            self.index.extend_keys(request, place + 1)
            key = request.block_hashes[place]
            if not self.index.has(key):
                self._first_unannounced.add(key)
                break
            place += 1

    def _to_announce(self, request: Request) -> tuple[int, int]:
        full = min(request.num_scheduled_tokens, request.num_known_tokens) // self.block_size
        return max(request.num_announced_blocks, request.num_hashed_blocks), full

    def announce_scheduled(self) -> None:
        """Makes the keys of what was said to `announce`. Done before the next plan, or in this one when somebody waits for
        one of them; best while the device computes.
        """
        if not self._unannounced:
            return
        for request in self._unannounced.values():
            first, full = self._to_announce(request)
            if full > first:
                self.index.extend_keys(request, full)
                self.pending.announce(request, request.block_hashes[first:full])
                request.num_announced_blocks = full
        self._unannounced.clear()
        self._first_unannounced.clear()

    def withdraw(self, request: Request) -> None:
        """Whatever the request has announced and not delivered will not come."""
        self._unannounced.pop(request.request_id, None)
        if request.num_announced_blocks > request.num_hashed_blocks:
            keys = request.block_hashes[request.num_hashed_blocks : request.num_announced_blocks]
            self.pending.forget_producer(request, keys)
            request.num_announced_blocks = request.num_hashed_blocks

    def num_blocks_to_take(self, hits: list[int], num_tokens: int) -> int:
        """Free blocks that a request with these hits takes out of the pool to hold `num_tokens`: hits that are free
        count too.
        """
        ref_counts = self.pool.ref_counts
        return self.num_blocks_for(num_tokens) - len(hits) + list(map(ref_counts.__getitem__, hits)).count(0)

    def num_private_blocks(self, request: Request) -> int:
        """Blocks of the table that nobody else refers to: those that come free with it."""
        ref_counts = self.pool.ref_counts
        return sum(ref_counts[block] == 1 for block in request.block_ids)

    def open_table(self, request: Request, hits: list[int], num_tokens: int) -> None:
        """Gives an admitted request its hits and new blocks for `num_tokens` in all. Raises PlanError when they are not
        there.
        """
        if self.num_blocks_for(num_tokens) > self.pool.num_free_blocks:
            needed = self.num_blocks_to_take(hits, num_tokens)
            if needed > self.pool.num_free_blocks:
                raise PlanError(f"{needed} free KV blocks needed, {self.pool.num_free_blocks} are there")
        self.pool.share(hits)  # first: a new block must not evict a hit
        fresh = self.pool.allocate(self.num_blocks_for(num_tokens) - len(hits))
        request.block_ids = hits + fresh
        request.num_hashed_blocks = request.num_announced_blocks = len(hits)

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Appends the blocks that the table lacks to hold `num_tokens`, and gives them. Raises PlanError when they are
        not there.
        """
        fresh = self.pool.allocate(max(0, self.num_blocks_for(num_tokens) - len(request.block_ids)))
        request.block_ids.extend(fresh)
        return fresh

    def index_computed(self, request: Request) -> None:
        """Indexes the blocks that confirmed tokens have filled since the last call."""
        full = request.num_computed_tokens // self.block_size
        if self.enable_prefix_caching:
            self.index.extend_keys(request, full)
            first, keys, pool = request.num_hashed_blocks, request.block_hashes, self.pool
            insert = self.index.insert
            for key, block in zip(keys[first:full], request.block_ids[first:full], strict=True):
                if insert(key, block):
                    pool.set_cached(block, True)
            if first < request.num_announced_blocks:
                self.pending.confirm(request, keys[first : min(full, request.num_announced_blocks)])
        request.num_hashed_blocks = full

    def release(self, request: Request, after: int | None) -> None:
        """Takes the request's table away; the blocks come free after step `after` (now when None or complete)."""
        self.withdraw(request)
        self.pool.free(request.block_ids, after)
        request.block_ids = []
        request.num_hashed_blocks = request.num_announced_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Forgets the prefixes in unreferenced blocks. Whether nothing is left: False while running requests hold
        indexed blocks.
        """
        for block in self.index.blocks():
            if self.pool.is_free(block):
                self.index.remove(block)
                self.pool.set_cached(block, False)
        return len(self.index) == 0

    def usage(self) -> float:
        """Share of the usable blocks that is in use, 0 to 1."""
        return 1.0 - self.pool.num_free_blocks / self.pool.num_blocks

    def waste(self, running: Iterable[Request]) -> float:
        """Unused token slots in the running requests' blocks over all their slots, 0 to 1; a shared block is counted
        once. O(running).

        Only full blocks are shared, so unused slots are in private tails.
        """
        unused = sum(len(r.block_ids) * self.block_size - r.num_scheduled_tokens for r in running)
        blocks = self.pool.num_blocks - self.pool.num_free_blocks - self.pool.num_blocks_only_deferred()
        return unused / (blocks * self.block_size) if blocks else 0.0

    def check_integrity(self, live: Iterable[Request]) -> None:
        """Audits pool and index against the tables of the live requests. Raises PoolIntegrityError. O(blocks)."""
        self.pool.check_integrity({r.request_id: r.block_ids for r in live})
        faults = self.index.faults()
        faults += [
            f"block {block} is outside the pool"
            for block in self.index.blocks()
            if not 1 <= block <= self.pool.num_blocks
        ]
        for block in range(1, self.pool.num_blocks + 1):
            if (block in self.index) != self.pool.is_cached(block):
                faults.append(
                    f"block {block}: index says {block in self.index}, pool says {self.pool.is_cached(block)}"
                )
        if faults:
            raise PoolIntegrityError("the prefix index is broken: " + "; ".join(faults[:20]))
