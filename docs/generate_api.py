"""Writes docs/operators/api.md from the endpoint table and the models that parse requests:

    python docs/generate_api.py

The same table and models make /openapi.json; tests/integration/test_openapi.py compares page and code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hotswap.core.sampling_params import INT_MAX
from hotswap.server.endpoints import ADMIN_ENDPOINTS, ENDPOINTS, Endpoint
from hotswap.server.openai.fields import NOT_SERVED, REMOVED, WITHOUT_EFFECT
from hotswap.server.openai.protocol import SamplingFields
from hotswap.server.openapi import api_document

PAGE = Path(__file__).parent / "operators" / "api.md"
HEAD = """# API

Generated from the endpoint table and the models that parse requests, with `python docs/generate_api.py`; a test compares them.
A running server serves the same as an OpenAPI document at `/openapi.json`, behind the API key. How the fields work together:
[serving.md](serving.md#request-fields).

## Endpoints

| method | path | key | |
|---|---|---|---|
"""
LISTS = """
## The three lists

A field of a request is in one of three lists: honoured (the tables above), accepted without effect, or refused. `null` means
"not said" for every field that has a name here.
"""


def page() -> str:
    """The whole page."""
    schemas = api_document(with_admin=True)["components"]["schemas"]
    table = [*ENDPOINTS, *ADMIN_ENDPOINTS]
    parts = [HEAD, *(_endpoint(endpoint) for endpoint in table)]
    parts.append("| GET | `/openapi.json` | API key | This document |\n")
    shared = SamplingFields.model_fields.keys()
    parts.append("\n## Fields of both generating routes\n\n")
    generating = [endpoint for endpoint in table if endpoint.event is not None]
    parts.append(_fields(schemas[_name(generating[0].request)], shared, schemas))
    for endpoint in table:
        if endpoint.request is None:
            continue
        schema = schemas[_name(endpoint.request)]
        own = [name for name in endpoint.request.model_fields if endpoint.event is None or name not in shared]
        if own:
            parts.append(f"\n## Fields of {endpoint.public_path}\n\n{_fields(schema, own, schemas)}")
    parts.append(LISTS)
    parts.append(f"\n### Accepted, without effect\n\n{_names(WITHOUT_EFFECT)}\n")
    parts.append(
        "\n### Refused\n\nNot served by this version, unless the value asks for nothing:\n\n| field | passes |\n|---|---|\n"
    )
    parts.extend(f"| `{name}` | {_values(neutral)} |\n" for name, neutral in sorted(NOT_SERVED.items()))
    parts.append("\nGone, with what to write instead:\n\n| field | instead |\n|---|---|\n")
    parts.extend(f"| `{old}` | `{new}` |\n" for old, new in sorted(REMOVED.items()))
    parts.append(
        "\nAnd every name that is not on this page: 400 with the nearest one. `--allow-unknown-fields` turns that into "
        "one warning\nin the log.\n"
    )
    for endpoint in generating:
        parts.append(f"\n## Answer of {endpoint.public_path}\n\n{_answer(endpoint, schemas)}")
    return "".join(parts)


def _name(model: Any) -> str:
    return str(model.__name__)


def _endpoint(endpoint: Endpoint) -> str:
    key = "open" if endpoint.public else "admin key" if endpoint.is_admin else "API key"
    return f"| {', '.join(endpoint.methods)} | `{endpoint.public_path}` | {key} | {endpoint.summary} |\n"


def _fields(schema: dict[str, Any], names: Iterable[str], schemas: dict[str, Any]) -> str:
    rows = ["| field | value | |\n|---|---|---|\n"]
    for name in names:
        field = schema["properties"][name]
        rows.append(f"| `{name}` | {_value(field, schemas)} | {field.get('description', '')} |\n")
    return "".join(rows)


def _answer(endpoint: Endpoint, schemas: dict[str, Any]) -> str:
    """The members of the answer, of its choices and of its usage, one below the other."""
    rows = ["| member | value | |\n|---|---|---|\n"]
    schema = schemas[_name(endpoint.answer)]
    for name, member in schema["properties"].items():
        rows.append(f"| `{name}` | {_value(member, schemas)} | {member.get('description', '')} |\n")
        inner = member.get("items", member).get("$ref")
        if inner is None:
            continue
        for below, value in schemas[inner.rsplit("/", 1)[1]]["properties"].items():
            rows.append(f"| `{name}.{below}` | {_value(value, schemas)} | {value.get('description', '')} |\n")
    return "".join(rows)


def _value(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """What may be given, in words."""
    if "$ref" in schema:
        inner = schemas[schema["$ref"].rsplit("/", 1)[1]]
        return "object: " + " ".join(f"`{name}`" for name in inner["properties"])
    if "anyOf" in schema:
        members = [_value(member, schemas) for member in schema["anyOf"] if member.get("type") != "null"]
        return " or ".join(dict.fromkeys(members))
    if "const" in schema or "enum" in schema:
        return _values(schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_value(schema.get('items', {}), schemas)}"
    words = {"string": "text", "integer": "integer", "number": "number", "boolean": "true, false", "object": "object"}
    word = words.get(str(kind), "null" if kind == "null" else "any")
    bounds = _bounds(*(schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum")))
    return f"{word}, {bounds}" if bounds else word


def _bounds(low: float | None, above: float | None, high: float | None) -> str:
    if low is None and above is None:
        return ""
    if low is not None and low <= -(2**63):
        return "64 bits"
    start = f"above {above:g}" if low is None else f"{low:g}"
    return f"{start} to {high:g}" if high is not None and high < INT_MAX else f"{start} or more"


def _values(values: Iterable[Any]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


def _names(names: Iterable[str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
