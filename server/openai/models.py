"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.responses import Response

from hotswap.core.errors import RequestError

from .routes import Services

_STARTED = int(time.time())


def _card(services: Services, name: str) -> dict[str, Any]:
    """max_model_len is the window that this server serves, which the KV cache may have made smaller than the
    model's."""
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "hotswap",
        "root": services.state.model_names[0],
        "parent": None,
        "max_model_len": services.state.ready_engine().info.max_model_len,
    }


def list_models(services: Services) -> Response:
    """Raises RequestError (503), EngineDeadError."""
    cards = [_card(services, name) for name in services.state.model_names]
    return _json({"object": "list", "data": cards})


def get_model(services: Services, name: str) -> Response:
    """Raises RequestError (404, 503), EngineDeadError."""
    services.state.ready_engine()
    if not name:
        raise RequestError("a model's name is required", param="model", code="model_not_found", status=404)
    return _json(_card(services, services.state.check_model(name)))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
