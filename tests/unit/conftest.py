"""Fixtures for tests of the HTTP layer: the application over a fake engine, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest


class Api:
    """The application, called in process. Every call runs on one event loop, which lives as long as the test."""

    def __init__(self, engine: Any, settings: dict[str, Any], engine_settings: dict[str, Any]) -> None:
        import httpx

        from hotswap.core.config import EngineConfig, ServerConfig
        from hotswap.server.app import create_app
        from hotswap.server.state import ServerState

        self.engine = engine
        self.state = ServerState(
            ServerConfig(**settings), EngineConfig.from_flat(model="tiny", **engine_settings), engine
        )
        self.app = create_app(self.state)
        self.runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False), base_url="http://localhost"
        )

    def call(self, method: str, path: str, **options: Any) -> Any:
        return self.runner.run(self._client.request(method, path, **options))

    def get(self, path: str, **options: Any) -> Any:
        return self.call("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> Any:
        return self.call("POST", path, json=body, **options)

    def complete(self, prompt: Any = "hello", **fields: Any) -> Any:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, content: Any = "hello", **fields: Any) -> Any:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def metric(self, name: str, /, **labels: str) -> float:
        """The sample's value; 0 when it is not there."""
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == f"hotswap:{name}" and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0


def events(reply: Any) -> list[dict[str, Any]]:
    """The JSON of each server-sent event; the stream must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture
def sse() -> Callable[[Any], list[dict[str, Any]]]:
    return events


@pytest.fixture
def make_api() -> Iterator[Callable[..., Api]]:
    """make_api(engine=None, engine_settings={}, **server settings)"""
    made: list[Api] = []

    def make(engine: Any = None, engine_settings: dict[str, Any] | None = None, **settings: Any) -> Api:
        from hotswap.core.testing.fake_engine import FakeEngine

        made.append(Api(engine or FakeEngine(), settings, engine_settings or {}))
        return made[-1]

    yield make
    for api in made:
        api.runner.close()


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api()
