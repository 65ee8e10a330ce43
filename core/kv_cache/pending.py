"""Which blocks steps in flight are computing, and who waits for them instead of computing them again.

    scheduled in a step    ->  announced here, by content key     a block that others may wait for
    the step is confirmed  ->  in the prefix index, not here      those who wait are released, and hit it
    the producer stops     ->  neither                            those who wait are released, and one computes it
A key is here only while all tokens of its block are in steps that were built and not confirmed. So every wait ends with
those steps, whatever happens to the producer's turn, share or class afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from ..request import Request


class PendingBlocks:
    """Content key -> the running requests that compute it, and those that wait for it.

    Several may compute the same block: one that owes prompt log-probabilities does so whatever others do.
    """

    def __init__(self) -> None:
        self._producers: dict[bytes, tuple[Request, ...]] = {}
        self._waiters: dict[bytes, dict[int, Request]] = {}
        self._awaited: dict[int, bytes] = {}  # request -> the key that it waits for
        self._released: list[Request] = []

    def __len__(self) -> int:
        """Blocks that are being computed."""
        return len(self._producers)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one of them."""
        return len(self._awaited)

    @property
    def has_released(self) -> bool:
        """Whether `take_released` has something to give."""
        return bool(self._released)

    def announce(self, request: Request, keys: Sequence[bytes]) -> None:
        """The request has just had the blocks with these keys put into a step."""
        producers, alone = self._producers, (request,)
        for key in keys:
            others = producers.setdefault(key, alone)
            if others is not alone:
                producers[key] = others + alone

    def is_pending(self, key: bytes) -> bool:
        """Whether the block is being computed."""
        return key in self._producers

    def num_pending(self, keys: Sequence[bytes], start: int, stop: int) -> int:
        """How many of keys[start:stop] are pending, from the first on without a gap."""
        return len(list(takewhile(self._producers.__contains__, keys[start:stop])))

    def wait(self, request: Request, key: bytes) -> None:
        """The request waits for the block until it is confirmed or will not come. Raises KeyError when nobody computes
        it.
        """
        if key not in self._producers:
            raise KeyError(f"request {request.request_id} would wait for a block that nobody computes")
        self._waiters.setdefault(key, {})[request.request_id] = request
        self._awaited[request.request_id] = key

    def forget_waiter(self, request: Request) -> None:
        """The request no longer waits (aborted). Nothing happens when it does not."""
        key = self._awaited.pop(request.request_id, None)
        if key is not None:
            waiters = self._waiters[key]
            del waiters[request.request_id]
            if not waiters:
                del self._waiters[key]

    def confirm(self, request: Request, keys: Sequence[bytes]) -> None:
        """The request has delivered these blocks: they are in the prefix index now."""
        waiters = self._waiters
        for key in keys:
            self._remove(request, key)
            if key in waiters:
                self._release(key)

    def forget_producer(self, request: Request, keys: Sequence[bytes]) -> None:
        """The request will not deliver these blocks (aborted, failed). Whoever waits goes on waiting for one that others
        compute too.
        """
        for key in keys:
            self._remove(request, key)
            if key not in self._producers:
                self._release(key)

    def take_released(self) -> list[Request]:
        """Requests whose wait has ended since the last call, in the order in which it ended."""
        released, self._released = self._released, []
        return released

    def faults(self, running: Iterable[Request], waiting: Iterable[Request]) -> list[str]:
        """What is wrong, given who runs and who waits for a block; empty when nothing is. For audits."""
        announced: dict[bytes, list[Request]] = {}
        for request in running:
            for key in request.block_hashes[request.num_hashed_blocks : request.num_announced_blocks]:
                announced.setdefault(key, []).append(request)
        wrong = [
            f"requests {sorted(r.request_id for r in producers)} are said to compute a block, "
            f"{sorted(r.request_id for r in announced.get(key, ()))} have it in flight"
            for key, producers in self._producers.items()
            if set(producers) != set(announced.get(key, ()))
        ]
        wrong += [f"{len(announced)} blocks are in flight, {len(self._producers)} are known"] * (
            len(announced) != len(self._producers)
        )
        waiting_ids = {request.request_id for request in waiting}
        if waiting_ids != set(self._awaited):
            wrong.append(f"requests {sorted(waiting_ids)} wait for a block, {sorted(self._awaited)} are known")
        wrong += [
            f"request {request_id} waits for a block that nobody computes"
            for request_id, key in self._awaited.items()
            if key not in announced or request_id not in self._waiters.get(key, ())
        ]
        wrong += [f"request {request.request_id} was released and not queued" for request in self._released]
        return wrong

    def _remove(self, request: Request, key: bytes) -> None:
        producers = self._producers.pop(key)
        if len(producers) > 1:
            self._producers[key] = tuple(other for other in producers if other is not request)

    def _release(self, key: bytes) -> None:
        for request in self._waiters.pop(key, {}).values():
            del self._awaited[request.request_id]
            self._released.append(request)
