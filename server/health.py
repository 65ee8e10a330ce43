"""Routes for operators: /health, /ping, /version, /metrics."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hotswap.core.version import __version__

from .errors import describe
from .metrics import CONTENT_TYPE
from .openai.routes import Services


def health(services: Services, request: Request) -> Response:
    """200 when a request would be served now; otherwise what a request would get (503), with the cause."""
    trouble = services.state.trouble()
    if trouble is not None:
        return describe(trouble, request.state.request_id).response()
    return Response(b'{"status":"ok"}', media_type="application/json")


def show_version() -> Response:
    return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")


def metrics(services: Services, _: Request) -> Response:
    """Served in every phase: a dying engine is what metrics are for."""
    return Response(services.metrics.expose(), headers={"content-type": CONTENT_TYPE})
