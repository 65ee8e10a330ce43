"""The running requests in service order: best class first, then oldest."""

from __future__ import annotations

from bisect import bisect_left

from ..request import Request

ServiceKey = tuple[int, float, int]


def service_key(request: Request) -> ServiceKey:
    """Sorts by class, then arrival, then id."""
    return request.priority, request.arrival_time, request.request_id


class RunningSet:
    """A sorted list. The key of a request must not change while it runs, unless `resort` follows at once."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._keys: list[ServiceKey] = []

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        key = service_key(request)
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self.requests.insert(place, request)

    def remove(self, request: Request) -> None:
        """Raises ValueError when the request does not run."""
        place = self.position(request)
        del self._keys[place]
        del self.requests[place]

    def resort(self) -> None:
        """After priorities were changed, between two steps: order as the keys are now."""
        self.requests.sort(key=service_key)
        self._keys = [service_key(request) for request in self.requests]

    def position(self, request: Request) -> int:
        """Its place in service order. Raises ValueError when the request does not run."""
        place = bisect_left(self._keys, service_key(request))
        if place == len(self.requests) or self.requests[place] is not request:
            raise ValueError(f"request {request.request_id} is not running")
        return place
