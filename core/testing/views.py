"""Request views as a plugin gets them: only what the contract lists, read-only, and dead once it must be let go."""

from __future__ import annotations

from typing import Any

from ..contracts.policy import RequestView
from ..request import Request

VIEW_FIELDS = frozenset(name for name in vars(RequestView) if isinstance(getattr(RequestView, name), property))


class ReadOnlyView:
    """A RequestView over a request that a test changes. Anything else of it, and any assignment, is an AttributeError;
    after `expire()` so is every access: whoever still holds the view has kept it for too long.
    """

    __slots__ = ("__weakref__", "_expired", "_request")

    def __init__(self, request: Request) -> None:
        object.__setattr__(self, "_request", request)
        object.__setattr__(self, "_expired", False)

    def __getattr__(self, name: str) -> Any:
        if name not in VIEW_FIELDS:
            raise AttributeError(f"a RequestView has no {name!r}: only {', '.join(sorted(VIEW_FIELDS))}")
        if self._expired:
            raise AttributeError(f"{name!r} of a view that is no longer valid: keep the fact, not the view")
        return getattr(self._request, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"views are read-only: {name!r} cannot be set")

    def __repr__(self) -> str:
        return f"<request {self._request.request_id}>"

    @property
    def request(self) -> Request:
        """The test's own, changeable side."""
        request: Request = self._request
        return request

    def expire(self) -> None:
        object.__setattr__(self, "_expired", True)
