"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response

from hotswap.core.errors import RequestError
from hotswap.core.sampling_params import SamplingParams

from .routes import Services

_STARTED = int(time.time())
_PUBLISHED: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def _card(services: Services, name: str) -> dict[str, Any]:
    """max_model_len is the window that this server serves, which the KV cache may have made smaller than the
    model's. default_sampling_params: what a request gets that says nothing about it."""
    engine = services.state.ready_engine()
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "hotswap",
        "root": services.state.model_names[0],
        "parent": None,
        "max_model_len": engine.info.max_model_len,
        "default_sampling_params": default_sampling_params(engine.generation_defaults),
    }


def default_sampling_params(generation_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own defaults over the engine's. max_tokens is there only if the model has one: else it is 16 for
    completions, and what is left of the window for chat."""
    params = SamplingParams()
    own = {name: getattr(params, name) for name in _PUBLISHED}
    return {**own, **{name: value for name, value in generation_defaults.items() if value is not None}}


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
