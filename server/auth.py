"""API keys: who may call. Deny by default; the few public paths are listed here and matched exactly."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

from hotswap.core.errors import UsageError

from .errors import ErrorReply

PUBLIC_PATHS = frozenset({"/health", "/ping", "/version"})

_REFUSED = ErrorReply(
    401,
    "a valid API key is required: send it as 'Authorization: Bearer KEY'",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
)


class KeyRing:
    """The accepted keys, kept as digests. repr and str never show one."""

    def __init__(self, keys: Iterable[str], what: str = "API key") -> None:
        """Raises UsageError for a key that no client could send."""
        digests = []
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or key.strip() != key:
                raise UsageError(f"an {what} must be printable ASCII, without spaces around it, and not empty")
            digests.append(_digest(key.encode()))
        self._digests = tuple(digests)

    def __repr__(self) -> str:
        return f"KeyRing({len(self._digests)} keys)"

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, authorization: bytes | None) -> bool:
        """Whether the header's value carries one of the keys. Every key is compared, always, in constant time."""
        scheme, _, key = (authorization or b"").partition(b" ")
        found = self.matches(key.strip())
        return found and scheme.lower() == b"bearer"

    def matches(self, key: bytes) -> bool:
        """Whether it is one of the keys."""
        presented = _digest(key)
        found = False
        for digest in self._digests:
            found |= secrets.compare_digest(digest, presented)
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Authentication:
    """Guards every path but the public ones, when there are keys."""

    def __init__(self, keys: KeyRing, *, metrics_public: bool = False) -> None:
        self._keys = keys
        self._public = PUBLIC_PATHS | {"/metrics"} if metrics_public else PUBLIC_PATHS

    def check(self, path: str, authorization: bytes | None) -> ErrorReply | None:
        """The refusal, or None. `path` is the raw ASGI scope's: the one that the router matches as well."""
        if not self._keys or path in self._public or self._keys.accepts(authorization):
            return None
        return _REFUSED
