"""What the two generating routes share: reading a request, making its Generation, answering whole or in a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from hotswap.core.errors import RequestError
from hotswap.core.sampling_params import SamplingParams

from ..json_body import parse_json_object, parsed, read_json_bytes
from ..limits import is_valid_request_id
from ..metrics import ServerMetrics
from ..state import InFlight, ServerState
from .generation import Generation
from .prompts import Prompt
from .protocol import ModelT, SamplingFields, parse_request
from .streaming import EventStream


@dataclass(frozen=True, slots=True)
class Services:
    """What a route works with."""

    state: ServerState
    metrics: ServerMetrics

    async def read(self, http: Request, model: type[ModelT]) -> ModelT:
        """The request's body, checked field by field. Raises RequestError, BodyRefused, EngineDeadError."""
        self.state.ready_engine()  # a server that cannot answer says so before it reads
        config = self.state.config
        body = await read_json_bytes(http, config.max_request_bytes)
        http.state.accepted.enter()
        return await parsed(
            lambda text: parse_request(model, parse_json_object(text), allow_unknown=config.allow_unknown_fields), body
        )

    def generation(
        self,
        http: Request,
        request: SamplingFields,
        prompts: list[Prompt],
        params: SamplingParams,
        model: str,
        id_prefix: str,
    ) -> Generation:
        return Generation(
            engine=self.state.ready_engine(),
            metrics=self.metrics,
            prompts=prompts,
            params=params,
            model=model,
            id_prefix=id_prefix,
            request_id=http.state.request_id,
            id_label=_label(request),
            priority=request.priority or 0,
            user=request.user or "",
            cache_salt=request.cache_salt,
            log_sizes=self.state.engine_config.enable_log_requests,
        )


def check_streaming(request: SamplingFields) -> None:
    """Raises RequestError (400) for options that need a stream, or cannot have one."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not available in a stream", param="prompt_logprobs")


async def answer(
    services: Services,
    http: Request,
    generation: Generation,
    request: SamplingFields,
    frames: Callable[[], AsyncGenerator[bytes, None]],
    whole: Callable[[], Awaitable[bytes]],
) -> Response:
    """Runs the generation, or prepares the response that will. A client that leaves ends it either way."""
    if request.stream:
        return EventStream(services.state, generation.request_id, frames)
    async with InFlight(services.state, http.receive):
        body = await whole()
    return Response(body, media_type="application/json")


def _label(request: SamplingFields) -> str | None:
    """The client's own label for the answer's id. Raises RequestError (400)."""
    label = request.request_id
    if label is not None and not (label.isascii() and is_valid_request_id(label.encode())):
        raise RequestError("request_id must be 1 to 128 printable ASCII characters", param="request_id")
    return label
