"""What the policies of this folder share whose order changes while requests wait: a queue by key, and an end to waiting."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Generic

from hotswap.core.contracts.policy import Policy, RequestView, Shed

from .keyed_queue import Key, KeyedQueue


class QueuedPolicy(Policy, Generic[Key]):
    """By ascending `key`, then by request id. A key holds until it is taken anew by `reorder`, once a step."""

    def __init__(self) -> None:
        self._queue: KeyedQueue[Key] = KeyedQueue()

    @abstractmethod
    def key(self, view: RequestView) -> Key:
        """A waiting request's place, as things are now."""

    def reorder(self) -> None:
        """A step begins: some waiting requests may get a new key."""

    def push(self, view: RequestView) -> None:
        self._queue.put(view, self.key(view))

    def peek(self) -> RequestView | None:
        return self._queue.first()

    def pop(self) -> RequestView:
        view = self.peek()
        if view is None:
            raise IndexError("pop from a policy with no waiting request")
        self.remove(view.request_id)
        return view

    def remove(self, request_id: int) -> None:
        self._queue.remove(request_id)

    def __len__(self) -> int:
        return len(self._queue)

    def waiting(self) -> Sequence[RequestView]:
        return self._queue.slice(0, len(self._queue))

    def shed(self) -> Iterable[Shed]:
        self.reorder()
        return ()


class PatientPolicy(QueuedPolicy[Key]):
    """Nobody waits for ever: whoever has waited for `patience` seconds is served before all others, the longest wait first.

    So at most those that wait longer, and those that are served until its time has come, go before a request. Time moves with
    steps and arrivals: between `peek` and `pop` nobody's time comes.

    clock: gives seconds on the engine's clock.
    """

    def __init__(self, clock: Callable[[], float], patience: float) -> None:
        super().__init__()
        self._clock = clock
        self._patience = patience
        self._now = clock()
        self._by_wait: KeyedQueue[tuple[float]] = KeyedQueue()

    def waits_since(self, view: RequestView) -> float:
        """When the request's patience began, in seconds on the engine's clock; asked when it is pushed."""
        return view.arrival_time

    def overdue(self) -> RequestView | None:
        """The one that has waited longest, if that is too long."""
        view = self._by_wait.first()
        if view is None or self._now - self._by_wait.key(view.request_id)[0] < self._patience:
            return None
        return view

    def push(self, view: RequestView) -> None:
        self._now = self._clock()
        super().push(view)
        self._by_wait.put(view, (self.waits_since(view),))

    def peek(self) -> RequestView | None:
        return self.overdue() or super().peek()

    def remove(self, request_id: int) -> None:
        super().remove(request_id)
        self._by_wait.remove(request_id)

    def shed(self) -> Iterable[Shed]:
        self._now = self._clock()
        return super().shed()
