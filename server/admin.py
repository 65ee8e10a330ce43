"""Routes that change the running server: under /admin, there only when an admin key is set, behind that key as well.

The admin key is another one than the API keys and has a header of its own, so that neither stands in for the other.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hotswap.core.errors import EngineDeadError, HotswapError, RequestError

from .auth import KeyRing
from .openai.protocol import StrictModel
from .openai.routes import Services

ADMIN_HEADER = "x-admin-key"


class PolicyChange(StrictModel):
    """POST /admin/plugins/policy."""

    name: str
    """Of an installed policy, as in `hotswap plugins`."""
    options: dict[str, Any] | None = None
    """Its options; those not given have their defaults."""


class NoFields(StrictModel):
    """A body without fields: `{}`."""


class AdminGate:
    """The one dependency of every admin route. Raises RequestError (403)."""

    def __init__(self, admin_key: str) -> None:
        """Raises UsageError for a key that no client could send."""
        self._keys = KeyRing([admin_key], what="admin key")

    async def __call__(self, request: Request) -> None:
        if not self._keys.matches(request.headers.get(ADMIN_HEADER, "").encode("latin-1")):
            raise RequestError(
                "this route needs the admin key: send it as 'X-Admin-Key: KEY'", code="admin_key_required", status=403
            )


async def set_policy(services: Services, http: Request) -> Response:
    """Swaps the policy between two steps. Raises RequestError, EngineDeadError."""
    change = await services.read(http, PolicyChange)
    return _json(await _call(services, "set_policy", name=change.name, options=change.options or {}))


async def list_plugins(services: Services, _: Request) -> Response:
    """Raises RequestError, EngineDeadError."""
    return _json({"plugins": await _call(services, "inventory")})


async def reset_prefix_cache(services: Services, http: Request) -> Response:
    """Raises RequestError, EngineDeadError."""
    await services.read(http, NoFields)
    return _json({"reset": bool(await _call(services, "reset_prefix_cache"))})


async def _call(services: Services, method: str, **arguments: Any) -> Any:
    """The engine's answer. What it refuses is the caller's fault, told in its own words."""
    engine = services.state.ready_engine()
    try:
        return await engine.call(method, **arguments)
    except (EngineDeadError, RequestError):
        raise
    except HotswapError as error:
        raise RequestError(str(error), code="refused") from error


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
