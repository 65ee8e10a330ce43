"""Puts the HTTP side together: routes, the guard around them, one error shape."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hotswap.core.errors import UsageError

from . import openapi
from .admin import AdminGate
from .auth import Authentication, KeyRing
from .endpoints import ADMIN_ENDPOINTS, ENDPOINTS, Endpoint
from .errors import describe
from .guard import Guard
from .limits import HostCheck
from .metrics import ServerMetrics
from .openai.routes import Services
from .state import ServerState

_NAMESPACE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A name that is nothing but a name wherever it is put: in a path, a header, a log line, a metric's label.
_SERVED_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}")


def create_app(state: ServerState) -> FastAPI:
    """The ASGI application. Raises UsageError for a key, a served name or a metrics namespace that cannot be used."""
    namespace = state.config.metrics_namespace
    if not _NAMESPACE.fullmatch(namespace):
        raise UsageError(f"--metrics-namespace {namespace!r}: letters, digits and _ only, and no digit first")
    for name in state.engine_config.model.served_model_name:
        if not _SERVED_NAME.fullmatch(name):
            raise UsageError(
                f"--served-model-name {name!r:.80}: 1 to 128 of the characters A-Z a-z 0-9 . _ / : @ + -, a letter or digit "
                "first, no '..'"
            )
    metrics = ServerMetrics(state)
    services = Services(state, metrics)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.hotswap = state
    _add_routes(app.router, services, ENDPOINTS)
    app.add_api_route(openapi.PATH, _document(state), methods=["GET"], response_model=None)
    if state.config.admin_key is not None:
        gate = AdminGate(state.config.admin_key.get_secret_value())
        router = APIRouter(dependencies=[Depends(gate)], redirect_slashes=False)
        _add_routes(router, services, ADMIN_ENDPOINTS)
        app.include_router(router)
    app.add_exception_handler(HTTPException, _reply)
    app.add_exception_handler(RequestValidationError, _reply)
    keys = KeyRing(key.get_secret_value() for key in state.config.api_key)
    authentication = Authentication(keys, metrics_public=state.config.metrics_public)
    app.add_middleware(
        Guard,
        authentication=authentication,
        host=HostCheck(state.config.host),
        state=state,
        on_refused=metrics.on_refused,
    )
    return app


async def _reply(request: Request, error: Exception) -> Response:
    return describe(error, request.state.request_id).response()


def _add_routes(router: APIRouter, services: Services, table: Iterable[Endpoint]) -> None:
    def serve(endpoint: Endpoint) -> None:
        async def work(request: Request) -> Response:
            result = endpoint.work(services, request)
            return await result if isinstance(result, Awaitable) else result

        router.add_api_route(endpoint.path, work, methods=list(endpoint.methods), response_model=None)

    for endpoint in table:
        serve(endpoint)


def _document(state: ServerState) -> Callable[[], Response]:
    """Made when it is first asked for: a server's start does not wait for it."""
    config = state.config
    made: list[bytes] = []

    def serve() -> Response:
        if not made:
            document = openapi.api_document(
                with_admin=config.admin_key is not None,
                allow_unknown_fields=config.allow_unknown_fields,
                metrics_public=config.metrics_public,
                model_names=state.model_names,
            )
            made.append(msgspec.json.encode(document))
        return Response(made[0], media_type="application/json")

    return serve
