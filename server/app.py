"""Puts the HTTP side together: routes, the guard around them, one error shape."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hotswap.core.errors import UsageError

from . import health, tokenize
from .auth import Authentication, KeyRing
from .errors import describe
from .guard import Guard
from .limits import HostCheck
from .metrics import ServerMetrics
from .openai.chat import create_chat_completion
from .openai.completions import create_completion
from .openai.models import get_model, list_models
from .openai.routes import Services
from .state import ServerState

_NAMESPACE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def create_app(state: ServerState) -> FastAPI:
    """The ASGI application. Raises UsageError for an API key or a metrics namespace that cannot be used."""
    namespace = state.config.metrics_namespace
    if not _NAMESPACE.fullmatch(namespace):
        raise UsageError(f"--metrics-namespace {namespace!r}: letters, digits and _ only, and no digit first")
    metrics = ServerMetrics(state)
    services = Services(state, metrics)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.hotswap = state
    _add_routes(app, services)
    app.add_exception_handler(HTTPException, _reply)
    app.add_exception_handler(RequestValidationError, _reply)
    keys = KeyRing(key.get_secret_value() for key in state.config.api_key)
    authentication = Authentication(keys, metrics_public=state.config.metrics_public)
    app.add_middleware(
        Guard, authentication=authentication, host=HostCheck(state.config.host), on_refused=metrics.on_refused
    )
    return app


async def _reply(request: Request, error: Exception) -> Response:
    return describe(error, request.state.request_id).response()


def _add_routes(app: FastAPI, services: Services) -> None:
    def route(path: str, methods: list[str], work: Callable[[Services, Request], Any]) -> None:
        async def endpoint(request: Request) -> Response:
            result = work(services, request)
            response: Response = await result if isinstance(result, Awaitable) else result
            return response

        app.add_api_route(path, endpoint, methods=methods, response_model=None)

    route("/v1/completions", ["POST"], create_completion)
    route("/v1/chat/completions", ["POST"], create_chat_completion)
    route("/v1/models", ["GET"], lambda services, _: list_models(services))
    route("/v1/models/{name:path}", ["GET"], lambda services, request: get_model(services, request.path_params["name"]))
    route("/tokenize", ["POST"], tokenize.tokenize)
    route("/detokenize", ["POST"], tokenize.detokenize)
    route("/health", ["GET", "HEAD"], health.health)
    route("/ping", ["GET", "HEAD", "POST"], health.health)
    route("/version", ["GET", "HEAD"], lambda *_: health.show_version())
    route("/metrics", ["GET", "HEAD"], health.metrics)
