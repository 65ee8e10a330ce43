"""The API document, held against what the server really does: generated and mutated requests, checked answers."""

from __future__ import annotations

import asyncio
import copy
import datetime
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from schemathesis import checks
from schemathesis.core.failures import FailureGroup

from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.server.admin import ADMIN_HEADER
from hotswap.server.app import create_app
from hotswap.server.endpoints import endpoints
from hotswap.server.openai import responses
from hotswap.server.openai.fields import NOT_SERVED, REMOVED, WITHOUT_EFFECT
from hotswap.server.openai.protocol import ChatRequest, CompletionRequest
from hotswap.server.openapi import PATH, api_document
from hotswap.server.state import ServerState

DOCS = Path(__file__).resolve().parents[2] / "docs"
BASE = "http://localhost"
# What a request can bring about, whatever it holds; 403 belongs to the admin routes.
STATUSES = {200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431}
# Those that a response is held against. Not among them: whether data that the schema allows is accepted (rules between
# fields are no part of a schema) and whether what it forbids is refused (a null is "not said").
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]


class InProcess:
    """The application over a fake engine, called with exact bytes."""

    def __init__(self, engine: FakeEngine | None = None) -> None:
        self.engine = engine or FakeEngine(max_model_len=64)
        config = ServerConfig(admin_key="admin-secret", max_request_bytes=100_000, max_requests_per_call=16)
        self.app = create_app(ServerState(config, EngineConfig.from_flat(model="tiny"), self.engine))
        self.runner = asyncio.Runner()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url=BASE)

    def send(self, method: str, path: str, content: Any = None, headers: Any = None) -> httpx.Response:
        headers = {ADMIN_HEADER.encode(): b"admin-secret", **(headers or {})}
        return self.runner.run(self._client.request(method, path, content=content, headers=headers))

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.send("POST", path, json.dumps(body), {b"content-type": b"application/json"})


@pytest.fixture(scope="module")
def server() -> Iterator[InProcess]:
    made = InProcess()
    yield made
    made.runner.close()


@pytest.fixture(scope="module")
def document(server: InProcess) -> dict[str, Any]:
    return dict(server.send("GET", PATH).json())


# The document.


def test_document_has_every_route_and_nothing_else(server: InProcess, document: dict[str, Any]) -> None:
    """Compared with the router, not with the table that made both."""
    served: dict[str, set[str]] = {}
    for route in server.app.routes:
        _collect(route, served)
    documented = {
        path: {method.upper() for method in operations if method != "parameters"}
        for path, operations in document["paths"].items()
    }
    assert documented == served
    assert document["openapi"].startswith("3.1")


def _collect(route: Any, served: dict[str, set[str]]) -> None:
    for inner in getattr(getattr(route, "original_router", None), "routes", ()):
        _collect(inner, served)
    if hasattr(route, "path") and getattr(route, "methods", None):
        served.setdefault(route.path.replace(":path}", "}"), set()).update(route.methods)


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_every_field_is_there_and_described(model: type[BaseModel], document: dict[str, Any]) -> None:
    schema = document["components"]["schemas"][model.__name__]
    assert schema["additionalProperties"] is False
    assert schema["properties"].keys() == model.model_fields.keys() | WITHOUT_EFFECT | NOT_SERVED.keys()
    assert not schema["properties"].keys() & REMOVED.keys()
    for name in model.model_fields:
        assert schema["properties"][name].get("description"), name
    integers = [m for p in schema["properties"].values() for m in p.get("anyOf", [p]) if m.get("type") == "integer"]
    assert integers


def test_defaults_are_values_that_may_be_sent(document: dict[str, Any]) -> None:
    components = document["components"]
    for name, schema in components["schemas"].items():
        for field, member in schema.get("properties", {}).items():
            if "default" in member:
                validator = jsonschema_rs.validator_for({**member, "components": components})
                assert validator.is_valid(member["default"]), f"{name}.{field}"


def test_lists_are_complete_for_openai() -> None:
    """Every parameter that the official client knows is in one of the three lists."""
    import typing

    from openai.types import completion_create_params as text
    from openai.types.chat import completion_create_params as chat

    for params, model in ((chat, ChatRequest), (text, CompletionRequest)):
        names = set(typing.get_type_hints(params.CompletionCreateParamsBase)) | {"stream"}
        assert len(names) > 15
        assert names <= model.model_fields.keys() | WITHOUT_EFFECT | NOT_SERVED.keys() | REMOVED.keys()
    for one, other in ((WITHOUT_EFFECT, NOT_SERVED.keys()), (NOT_SERVED.keys(), REMOVED.keys())):
        assert not set(one) & set(other)


def test_document_is_behind_the_key_and_says_so() -> None:
    state = ServerState(ServerConfig(api_key=["k"]), EngineConfig.from_flat(model="tiny"), FakeEngine())
    transport = httpx.ASGITransport(create_app(state))

    async def ask(**headers: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
            return await client.get(PATH, headers=headers)

    assert asyncio.run(ask()).status_code == 401
    found = asyncio.run(ask(authorization="Bearer k")).json()
    assert not any(path.startswith("/admin") for path in found["paths"])
    for endpoint in endpoints(with_admin=False):
        for method in endpoint.methods:
            operation = found["paths"][endpoint.public_path][method.lower()]
            assert ("401" in operation["responses"]) == ("security" in operation) == (not endpoint.public)


def test_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate_api", DOCS / "generate_api.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.PAGE.read_text() == generator.page(), "run: python docs/generate_api.py"


# Generated requests.


def check_generated(server: InProcess, operation: Any, mode: schemathesis.GenerationMode, examples: int) -> None:
    """schemathesis makes the requests and judges the answers; the error shape and the set of statuses are ours to judge."""

    @hypothesis.seed(7)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        wanted = ("method", "url", "headers", "params", "json", "data", "cookies")
        arguments = {k: v for k, v in case.as_transport_kwargs(base_url=BASE).items() if k in wanted}
        sent = requests.Request(**arguments).prepare()
        headers = {_latin(name): _latin(value) for name, value in sent.headers.items()}
        response = server.send(str(sent.method), str(sent.url), sent.body, headers)
        judge(response)
        case.validate_response(response, checks=CHECKS)

    run()


def _latin(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1")


def judge(response: httpx.Response) -> None:
    assert response.status_code in STATUSES, (response.status_code, response.text)
    if response.status_code != 200 and response.request.method != "HEAD":
        responses.ErrorAnswer.model_validate_json(response.content)
        assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]


def operations_of(document: dict[str, Any]) -> dict[str, Any]:
    schema = schemathesis.openapi.from_dict(document)
    found: list[Any] = list(schema.get_all_operations())
    return {result.ok().label: result.ok() for result in found}


# Document-free names, so that a parametrisation needs no server.
LABELS = [f"{method} {e.public_path}" for e in endpoints(with_admin=True) for method in e.methods] + [f"GET {PATH}"]
MODES = list(schemathesis.GenerationMode)
HEAVY = {"POST /v1/completions": 40, "POST /v1/chat/completions": 25}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: str(mode.value))
def test_generated_requests(server: InProcess, document: dict[str, Any], mode: schemathesis.GenerationMode) -> None:
    operations = operations_of(document)
    assert sorted(operations) == sorted(LABELS)
    for label, operation in operations.items():
        check_generated(server, operation, mode, HEAVY.get(label, 6))
    assert server.engine.stats.num_running == 0


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: str(mode.value))
@pytest.mark.parametrize("label", LABELS)
def test_many_generated_requests(
    server: InProcess, document: dict[str, Any], label: str, mode: schemathesis.GenerationMode
) -> None:
    check_generated(server, operations_of(document)[label], mode, 1500 if label in HEAVY else 150)


def test_generated_requests_find_a_fault(document: dict[str, Any]) -> None:
    """The control: a route that raises must not pass, nor one that answers in another shape."""
    broken = FakeEngine(max_model_len=64)

    def explode(*_: Any, **__: Any) -> Any:
        raise ValueError("inside")

    broken.generate = explode  # type: ignore[method-assign]
    server = InProcess(broken)
    operation = operations_of(document)["POST /v1/completions"]
    with pytest.raises(AssertionError, match="500"):
        check_generated(server, operation, schemathesis.GenerationMode.POSITIVE, 20)

    class Canned(InProcess):
        """Answers everything alike."""

        def __init__(self, status: int, body: Any) -> None:
            self._answer = status, body

        def send(self, method: str, path: str, content: Any = None, headers: Any = None) -> httpx.Response:
            status, body = self._answer
            request = httpx.Request(method, f"{BASE}{TEXT}")
            response = httpx.Response(status, json=body, headers={"x-request-id": "a"}, request=request)
            response.elapsed = datetime.timedelta(0)
            return response

    with pytest.raises(AssertionError, match="422"):
        check_generated(Canned(422, {"detail": []}), operation, schemathesis.GenerationMode.NEGATIVE, 5)
    with pytest.raises(ValidationError, match="detail"):
        check_generated(Canned(400, {"detail": []}), operation, schemathesis.GenerationMode.NEGATIVE, 5)
    with pytest.raises(FailureGroup, match=r"[Ss]chema"):
        check_generated(Canned(200, {"id": 5}), operation, schemathesis.GenerationMode.POSITIVE, 5)


# Mutations of requests that clients send.

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_USER = {"role": "user", "content": "Hello!"}
RECORDED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": "tiny", "messages": [_USER]}),
    (
        CHAT,
        {
            "model": "tiny",
            "messages": [{"role": "system", "content": "Be brief."}, _USER],
            "temperature": 0.7,
            "top_p": 0.9,
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": "c"},
                _USER,
            ],
            "logprobs": True,
            "top_logprobs": 3,
            "n": 2,
            "max_completion_tokens": 4,
            "stop": ["x", "y"],
            "seed": 5,
        },
    ),
    (TEXT, {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 7, "temperature": 0}),
    (TEXT, {"model": "tiny", "prompt": ["a", "bc"], "n": 2, "echo": True, "logprobs": 2, "stream": True}),
    (TEXT, {"prompt": [72, 101, 108], "max_tokens": 0, "echo": True, "logprobs": 1}),
    (
        TEXT,
        {
            "prompt": [[72, 101], [108]],
            "logit_bias": {"80": -100, "81": 5.5},
            "stop_token_ids": [90],
            "allowed_token_ids": [80, 81, 82],
            "bad_words": ["no"],
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "prompt_logprobs": 1,
            "return_token_ids": True,
            "cache_salt": "tenant",
            "user": "u",
        },
    ),
    ("/tokenize", {"prompt": "Hello", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {"messages": [_USER]}),
    ("/detokenize", {"tokens": [72, 101, 108]}),
]
ANSWERS: dict[str, type[BaseModel]] = {e.path: e.answer for e in endpoints(with_admin=False) if e.answer is not None}
EVENTS: dict[str, type[BaseModel]] = {e.path: e.event for e in endpoints(with_admin=False) if e.event is not None}
HOSTILE = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**40, 0.5, -0.0, 1e308, 5e-324),
            *("", "\x00", "\ud83d", "a" * 5000, "<|im_start|>", "\u202e", "5", "NaN", [], {}, [[]], [None], {"": None}),
            *([0] * 200, {"a": {"b": {}}}, ["x"] * 40, {"type": "text"}, {"0": 1}, float("nan"), float("inf")),
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(st.none() | st.booleans() | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)
NAMES = sorted(
    ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys() | WITHOUT_EFFECT | NOT_SERVED.keys()
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in JSON data."""
    found: list[tuple[Any, Any]] = []
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        found.extend(places(value[key]))
    return found


@st.composite
def mutated(draw: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    path, original = draw(st.sampled_from(RECORDED))
    body = copy.deepcopy(original)
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["replace", "replace", "drop", "add", "append"]))
        container, key = draw(st.sampled_from(places(body) or [(body, "prompt")]))
        if kind == "replace":
            container[key] = copy.deepcopy(draw(HOSTILE))
        elif kind == "drop" and key in (container if isinstance(container, dict) else range(len(container))):
            del container[key]
        elif kind == "append" and isinstance(container, list):
            container.append(copy.deepcopy(draw(HOSTILE)))
        else:
            body[draw(st.sampled_from(NAMES))] = copy.deepcopy(draw(HOSTILE))
    return path, body


def check_answer(path: str, response: httpx.Response) -> None:
    judge(response)
    if response.status_code != 200:
        return
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        for event in events[:-1]:
            model = responses.ErrorAnswer if event.startswith('{"error"') else EVENTS[path]
            model.model_validate_json(event)
    else:
        ANSWERS[path].model_validate_json(response.content)


@pytest.mark.parametrize(("path", "body"), RECORDED)
def test_recorded_requests_are_answered(server: InProcess, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    check_answer(path, response)


def check_mutations(server: InProcess, examples: int) -> dict[int, int]:
    counts: dict[int, int] = {}

    @hypothesis.seed(11)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(mutated())
    def run(request: tuple[str, dict[str, Any]]) -> None:
        path, body = request
        response = server.post(path, body)
        counts[response.status_code] = counts.get(response.status_code, 0) + 1
        check_answer(path, response)

    run()
    return counts


def test_mutated_requests(server: InProcess) -> None:
    counts = check_mutations(server, 300)
    assert counts[200] > 20 and counts[400] > 100, counts
    assert server.engine.stats.num_running == 0


@pytest.mark.full
def test_many_mutated_requests(server: InProcess) -> None:
    check_mutations(server, 20_000)


def test_mutated_requests_find_a_fault() -> None:
    broken = FakeEngine(max_model_len=64)

    def explode(*_: Any, **__: Any) -> Any:
        raise ValueError("inside")

    broken.generate = explode  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="500"):
        check_mutations(InProcess(broken), 50)


def test_a_document_without_a_server_is_the_same() -> None:
    """The page is made of it."""
    assert api_document(with_admin=True)["paths"].keys() == set(api_document(with_admin=False)["paths"]) | {
        e.path for e in endpoints(with_admin=True) if e.is_admin
    }
