"""Every route, once: what serves it, what it reads and what it answers.

The application and the API document are made of this table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from . import admin, health, tokenize
from .auth import PUBLIC_PATHS
from .openai import responses
from .openai.chat import create_chat_completion
from .openai.completions import create_completion
from .openai.models import get_model, list_models
from .openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .openai.routes import Services

Work = Callable[[Services, Request], Response | Awaitable[Response]]
ADMIN_PREFIX = "/admin"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """work: what serves it. request: the model that its JSON body is parsed with. answer: of status 200; None for text.
    event: of a stream, when the request asks for one. needs_engine: 503 while there is none."""

    path: str
    methods: tuple[Literal["GET", "HEAD", "POST"], ...]
    work: Work
    summary: str
    request: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    needs_engine: bool = True
    serves_models: bool = False

    @property
    def public(self) -> bool:
        return self.path in PUBLIC_PATHS

    @property
    def is_admin(self) -> bool:
        return self.path.startswith(ADMIN_PREFIX + "/")

    @property
    def public_path(self) -> str:
        """As users write it: without the router's own notation."""
        return self.path.replace(":path}", "}")


ENDPOINTS = (
    Endpoint(
        "/v1/completions",
        ("POST",),
        create_completion,
        "Continue text or token ids, one or many prompts, whole or as a stream",
        CompletionRequest,
        responses.CompletionAnswer,
        responses.CompletionChunk,
        serves_models=True,
    ),
    Endpoint(
        "/v1/chat/completions",
        ("POST",),
        create_chat_completion,
        "Answer a conversation, whole or as a stream",
        ChatRequest,
        responses.ChatAnswer,
        responses.ChatChunk,
        serves_models=True,
    ),
    Endpoint(
        "/v1/models",
        ("GET",),
        lambda services, _: list_models(services),
        "The served names, with the window",
        answer=responses.ModelList,
    ),
    Endpoint(
        "/v1/models/{name:path}",
        ("GET",),
        lambda services, request: get_model(services, request.path_params["name"]),
        "One served name",
        answer=responses.ModelCard,
        serves_models=True,
    ),
    Endpoint(
        "/tokenize",
        ("POST",),
        tokenize.tokenize,
        "The token ids that a prompt or a conversation becomes",
        TokenizeRequest,
        responses.TokenizeAnswer,
        serves_models=True,
    ),
    Endpoint(
        "/detokenize",
        ("POST",),
        tokenize.detokenize,
        "The text of token ids",
        DetokenizeRequest,
        responses.DetokenizeAnswer,
        serves_models=True,
    ),
    Endpoint(
        "/health",
        ("GET", "HEAD"),
        health.health,
        "200 when a request would be served now, else 503 with the cause",
        answer=responses.HealthAnswer,
    ),
    Endpoint("/ping", ("GET", "HEAD", "POST"), health.health, "The same as /health", answer=responses.HealthAnswer),
    Endpoint(
        "/version",
        ("GET", "HEAD"),
        lambda *_: health.show_version(),
        "The version",
        answer=responses.VersionAnswer,
        needs_engine=False,
    ),
    Endpoint("/metrics", ("GET", "HEAD"), health.metrics, "Prometheus' text format", needs_engine=False),
)

ADMIN_ENDPOINTS = (
    Endpoint(
        "/admin/plugins",
        ("GET",),
        admin.list_plugins,
        "What is installed, at work, rejected, and why",
        answer=responses.PluginList,
    ),
    Endpoint(
        "/admin/plugins/policy",
        ("POST",),
        admin.set_policy,
        "Swap the policy while requests run",
        admin.PolicyChange,
        responses.PolicyAnswer,
    ),
    Endpoint(
        "/admin/reset_prefix_cache",
        ("POST",),
        admin.reset_prefix_cache,
        "Forget cached prefixes",
        admin.NoFields,
        responses.ResetAnswer,
    ),
)


def endpoints(*, with_admin: bool) -> Iterator[Endpoint]:
    yield from ENDPOINTS
    if with_admin:
        yield from ADMIN_ENDPOINTS
