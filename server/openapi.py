"""The API document (OpenAPI 3.1), made of the endpoint table and of the models that parse requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from hotswap.core.sampling_params import ABOVE_LOWEST, INTEGER_BOUNDS, NUMBER_BOUNDS
from hotswap.core.version import __version__

from .admin import ADMIN_HEADER
from .endpoints import Endpoint, endpoints
from .limits import MAX_REQUEST_ID_CHARS
from .openai.fields import NOT_SERVED, WITHOUT_EFFECT
from .openai.protocol import SamplingFields
from .openai.responses import ErrorAnswer

PATH = "/openapi.json"
_JSON = "application/json"
_MEANINGS = {
    400: "A header, a field or a value is not valid, or the prompt does not fit the window",
    401: "An API key is set, and the request brings none of them",
    403: "The admin key is missing or wrong",
    404: "No such path or model",
    405: "The path does not have this method",
    408: "The body came too slowly",
    413: "The body is larger than --max-request-bytes",
    415: "The body is not JSON, or it is compressed",
    429: "The queue is full; Retry-After is set",
    431: "The header block is larger than 64 KiB",
    500: "A fault of the server; its log has the cause under the request id",
    503: "Starting, draining, or the engine is dead; Retry-After is set",
}
_BODY_STATUSES = (408, 413, 415)


def api_document(
    *,
    with_admin: bool,
    allow_unknown_fields: bool = False,
    metrics_public: bool = False,
    model_names: Sequence[str] = (),
) -> dict[str, Any]:
    """The document of a server with these settings. model_names: what it serves; none leaves the name open."""
    table = list(endpoints(with_admin=with_admin))
    schemas = _schemas(table, allow_unknown_fields)
    name: dict[str, Any] = {"enum": list(model_names)} if model_names else {"type": "string"}
    for endpoint in table:
        if endpoint.request is not None and "model" in endpoint.request.model_fields:
            schemas[endpoint.request.__name__]["properties"]["model"]["anyOf"] = [name, {"type": "null"}]
    paths: dict[str, Any] = {}
    for endpoint in table:
        operations = {
            method.lower(): _operation(endpoint, method, metrics_public=metrics_public) for method in endpoint.methods
        }
        paths[endpoint.public_path] = {"parameters": _parameters(endpoint, name), **operations}
    paths[PATH] = {"parameters": [_request_label()], "get": _own_operation()}
    schemes: dict[str, Any] = {"key": {"type": "http", "scheme": "bearer"}}
    if with_admin:
        schemes["admin"] = {"type": "apiKey", "in": "header", "name": ADMIN_HEADER}
    return {
        "openapi": "3.1.0",
        "info": {"title": "hotswap", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": schemes},
    }


def _schemas(table: Iterable[Endpoint], allow_unknown: bool) -> dict[str, Any]:
    read = {endpoint.request for endpoint in table if endpoint.request is not None}
    written = {model for endpoint in table for model in (endpoint.answer, endpoint.event) if model is not None}
    models: list[tuple[type[BaseModel], Any]] = [(model, "validation") for model in sorted(read, key=_name)]
    models += [(model, "serialization") for model in sorted(written | {ErrorAnswer}, key=_name)]
    _, shared = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = dict(sorted(shared["$defs"].items()))
    for model in read:
        _complete_request(model, schemas[model.__name__], allow_unknown)
    for schema in schemas.values():
        for member in schema.get("properties", {}).values():
            if member.get("default", 0) is None and not _admits_null(member):
                del member["default"]  # the model's own sign of absence, no value that may be sent
    return schemas


def _admits_null(schema: dict[str, Any]) -> bool:
    return any(
        member.get("type") == "null" or None in member.get("enum", ()) for member in schema.get("anyOf", [schema])
    )


def _name(model: type[BaseModel]) -> str:
    return model.__name__


def _complete_request(model: type[BaseModel], schema: dict[str, Any], allow_unknown: bool) -> None:
    """Adds what is not pydantic's to know: the fields that are judged before it, and the engine's own bounds."""
    properties = schema.setdefault("properties", {})
    schema["additionalProperties"] = allow_unknown
    if not issubclass(model, SamplingFields):
        return
    if "prompt" in properties:
        schema["required"] = ["prompt"]
    for name, schema_of_field in properties.items():
        _bound(name, schema_of_field)
    for name in sorted(WITHOUT_EFFECT - properties.keys()):
        properties[name] = {"description": "Accepted, without effect."}
    for name, neutral in sorted(NOT_SERVED.items()):
        if name not in properties:
            properties[name] = {"enum": [None, *neutral], "description": "Not served by this version."}


def _parameters(endpoint: Endpoint, name: dict[str, Any]) -> list[dict[str, Any]]:
    parameters = [_request_label()]
    if "{name}" in endpoint.public_path:
        parameters.append({"name": "name", "in": "path", "required": True, "schema": name})
    return parameters


def _request_label() -> dict[str, Any]:
    return {
        "name": "X-Request-Id",
        "in": "header",
        "required": False,
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_REQUEST_ID_CHARS, "pattern": "^[!-~]+$"},
        "description": "Your label for the request, in its answer and in the log; a new one when absent.",
    }


def _bound(name: str, schema: dict[str, Any]) -> None:
    bounds: tuple[float, float] | None = INTEGER_BOUNDS.get(name) or NUMBER_BOUNDS.get(name)
    if bounds is None:
        return
    for member in schema.get("anyOf", [schema]):
        if member.get("type") in ("integer", "number"):
            member["exclusiveMinimum" if name in ABOVE_LOWEST else "minimum"] = bounds[0]
            member["maximum"] = bounds[1]


def _operation(endpoint: Endpoint, method: str, *, metrics_public: bool) -> dict[str, Any]:
    public = endpoint.public or (metrics_public and endpoint.path == "/metrics")
    statuses = {400, 405, 431, 500}
    if not public:
        statuses.add(401)
    if endpoint.needs_engine:
        statuses.add(503)
    if endpoint.serves_models:
        statuses.add(404)
    if endpoint.event is not None:
        statuses.add(429)
    if endpoint.is_admin:
        statuses.add(403)
    if endpoint.request is not None:
        statuses.update(_BODY_STATUSES)
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()} {endpoint.public_path}",
        "summary": endpoint.summary,
        "responses": {"200": _success(endpoint), **_errors(statuses)},
    }
    if endpoint.request is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: _schema_of(endpoint.request)}}
    if not public:
        operation["security"] = [{"key": [], "admin": []}, {"admin": []}] if endpoint.is_admin else [{"key": []}, {}]
    return operation


def _success(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.answer is not None:
        content[_JSON] = _schema_of(endpoint.answer)
    if endpoint.event is not None:
        what = (
            f"Server-sent events: the data of each is a {endpoint.event.__name__} or an {ErrorAnswer.__name__}, of the "
            "last `[DONE]`."
        )
        # Without a type: some readers hold the whole text against it, others each event.
        content["text/event-stream"] = {"schema": {"description": what}}
    if not content:
        content["text/plain"] = {"schema": {"type": "string"}}
    return {"description": endpoint.summary, "content": content}


def _errors(statuses: Iterable[int]) -> Mapping[str, Any]:
    return {
        str(status): {"description": _MEANINGS[status], "content": {_JSON: _schema_of(ErrorAnswer)}}
        for status in sorted(statuses)
    }


def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}


def _own_operation() -> dict[str, Any]:
    summary = "This document"
    return {
        "operationId": f"get {PATH}",
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": {_JSON: {"schema": {"type": "object"}}}},
            **_errors((400, 401, 405, 431, 500)),
        },
        "security": [{"key": []}, {}],
    }
