"""Waiting requests in ascending order of a key that may change while they wait: a heap whose outdated entries are dropped when
they surface, or once they are the majority. For the policies of this folder.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import islice
from typing import Generic, TypeVar

from hotswap.core.contracts.policy import RequestView

Key = TypeVar("Key", bound=tuple[float, ...])

_OUTDATED_KEPT = 64


class KeyedQueue(Generic[Key]):
    """Every call is O(log n) on average where it does not say otherwise. Ties go to the lower request id.

    A request has one key. Entries of the heap that say another one, or are of a request that does not wait, are outdated.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int]] = []
        self._waiting: OrderedDict[int, tuple[Key, RequestView]] = OrderedDict()  # by age in this queue

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def put(self, view: RequestView, key: Key) -> None:
        """Adds a request, or gives one that waits another key."""
        request_id = view.request_id
        known = self._waiting.get(request_id)
        if known is not None and known[0] == key:
            return
        self._waiting[request_id] = key, view
        heapq.heappush(self._heap, (key, request_id))
        self._compact()

    def first(self) -> RequestView | None:
        """The request with the lowest key; None when nobody waits."""
        heap, waiting = self._heap, self._waiting
        while heap:
            key, request_id = heap[0]
            entry = waiting.get(request_id)
            if entry is not None and entry[0] == key:
                return entry[1]
            heapq.heappop(heap)
        return None

    def key(self, request_id: int) -> Key:
        """The key of a request that waits. Raises KeyError."""
        return self._waiting[request_id][0]

    def remove(self, request_id: int) -> None:
        """Raises KeyError when the request does not wait."""
        del self._waiting[request_id]
        self._compact()

    def slice(self, start: int, stop: int) -> list[RequestView]:
        """Those that have been here longest, from place `start` on and before `stop`. O(stop)."""
        return [view for _, view in islice(self._waiting.values(), start, stop)]

    def rotate(self, count: int) -> list[RequestView]:
        """The first `count` of those that `slice` counts through, which are put behind all others. O(count)."""
        views = self.slice(0, count)
        for view in views:
            self._waiting.move_to_end(view.request_id)
        return views

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._waiting) + _OUTDATED_KEPT:
            self._heap = [(key, request_id) for request_id, (key, _) in self._waiting.items()]
            heapq.heapify(self._heap)
