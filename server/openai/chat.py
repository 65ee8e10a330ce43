"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hotswap.core.engine.output_processor import merge_delta
from hotswap.core.errors import RequestError
from hotswap.core.outputs import CompletionOutput, RequestOutput

from .generation import Generation
from .logprobs import chat_logprobs, prompt_logprobs
from .prompts import encode_messages
from .protocol import ChatRequest, check_response_format
from .routes import Services, answer, check_streaming
from .sampling import num_choices, requested_max_tokens, sampling_params
from .streaming import ChunkWriter, encode_member, end_of_choice
from .tools import ChoiceText, Piece, ToolUse, WholeText, tool_use

_encode = msgspec.json.encode
OBJECT = "chat.completion"
CHUNK_OBJECT = "chat.completion.chunk"
ROLE = "assistant"


async def create_chat_completion(services: Services, http: Request) -> Response:
    """Raises RequestError, BodyRefused, EngineDeadError."""
    request = await services.read(http, ChatRequest)
    engine = services.state.ready_engine()
    model = services.state.check_model(request.model)
    _check(request, services.state.engine_config.max_logprobs)
    num_choices(request, 1, services.state.config.max_requests_per_call)
    params = sampling_params(
        request,
        engine.generation_defaults,
        default_max_tokens=None,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        has_text=True,
    )
    use = tool_use(request, engine, auto_allowed=services.state.config.enable_auto_tool_choice)
    prompt = await encode_messages(services.state, engine, request, use.shown)
    generation = services.generation(http, request, [prompt], params, model, "chatcmpl")
    work = _Chat(generation, request, use)
    return await answer(services, http, generation, request, work.frames, work.whole)


def _check(request: ChatRequest, max_logprobs: int) -> None:
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if not 0 <= request.top_logprobs <= max_logprobs:
            raise RequestError(f"top_logprobs must be between 0 and {max_logprobs}", param="top_logprobs")
    if requested_max_tokens(request) == 0:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    check_response_format(request.response_format)
    check_streaming(request)


class _Chat:
    """One call's answer, whole or in chunks."""

    def __init__(self, generation: Generation, request: ChatRequest, use: ToolUse) -> None:
        self._generation = generation
        self._request = request
        self._as_ids = request.return_tokens_as_token_ids is True
        self._with_ids = request.return_token_ids is True
        self._num_top = (request.top_logprobs or 0) if request.logprobs else None
        self._prefix = _last_assistant_text(request) if request.echo else ""
        self._use = use

    async def _pieces(self) -> AsyncGenerator[tuple[RequestOutput, list[Piece]], None]:
        """(delta, what it adds to each of its choices), until every choice has ended. Closing it aborts what runs.

        A choice may end before the engine is told (ChoiceText); what comes for it then is left out.
        """
        generation = self._generation
        texts = {index: ChoiceText(self._use) for index in range(generation.params.n)}
        async with aclosing(generation.deltas()) as deltas:
            async for _, output in deltas:
                output.outputs = [choice for choice in output.outputs if choice.index in texts]
                try:
                    pieces = [texts[choice.index].read(choice) for choice in output.outputs]
                except RequestError:
                    generation.closed_as = "error"
                    raise
                for choice, piece in zip(output.outputs, pieces, strict=True):
                    if piece.finish_reason is not None:
                        del texts[choice.index]
                if not texts and not output.finished:
                    generation.closed_as = "stop"
                    yield output, pieces
                    return
                yield output, pieces

    # In chunks.

    async def frames(self) -> AsyncGenerator[bytes, None]:
        generation = self._generation
        writer = ChunkWriter(generation, CHUNK_OBJECT, self._request.stream_options)
        greeted = False
        async with aclosing(self._pieces()) as deltas:
            async for output, pieces in deltas:
                parts = []
                if not greeted:
                    greeted = True
                    parts.extend(self._greetings(writer, output))
                for choice, piece in zip(output.outputs, pieces, strict=True):
                    payload = self._chunk(choice, piece)
                    if payload is not None:
                        parts.append(writer.choice(choice.index, payload))
                if parts:
                    yield b"".join(parts)
        yield writer.last()

    def _greetings(self, writer: ChunkWriter, output: RequestOutput) -> list[bytes]:
        """The first chunk of each choice: its role, and the echoed beginning if asked for."""
        delta = _encode({"role": ROLE, "content": self._prefix})
        payload = b'"delta":' + delta + b',"logprobs":null' + end_of_choice(None, None)
        ids = encode_member(b"prompt_token_ids", output.prompt_token_ids) if self._with_ids else b""
        return [writer.choice(index, payload, ids if index == 0 else b"") for index in range(self._generation.params.n)]

    def _chunk(self, choice: CompletionOutput, piece: Piece) -> bytes | None:
        """The choice's members; None when there is nothing to say (its text is held back)."""
        has_logprobs = self._num_top is not None and bool(choice.logprobs)
        has_ids = self._with_ids and bool(choice.token_ids)
        if not (piece.content or piece.calls or piece.finish_reason is not None or has_logprobs or has_ids):
            return None
        delta = self._delta(piece, has_logprobs)
        parts = [b'"delta":', delta, b',"logprobs":', _encode(self._logprobs_of(choice)) if has_logprobs else b"null"]
        parts.append(end_of_choice(piece.finish_reason, piece.stop_reason))
        if self._with_ids:
            parts.append(encode_member(b"token_ids", choice.token_ids))
        return b"".join(parts)

    @staticmethod
    def _delta(piece: Piece, has_logprobs: bool) -> bytes:
        if piece.calls:
            calls = {"tool_calls": piece.calls}
            return _encode({"content": piece.content, **calls} if piece.content else calls)
        return b'{"content":' + _encode(piece.content) + b"}" if piece.content or has_logprobs else b"{}"

    def _logprobs_of(self, choice: CompletionOutput) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        return chat_logprobs(choice.logprobs or (), self._num_top, as_token_ids=self._as_ids)

    # Whole.

    async def whole(self) -> bytes:
        total: RequestOutput | None = None
        texts = {index: WholeText() for index in range(self._generation.params.n)}
        async with aclosing(self._pieces()) as deltas:
            async for output, pieces in deltas:
                for choice, piece in zip(output.outputs, pieces, strict=True):
                    texts[choice.index].add(piece)
                if total is None:
                    total = output
                else:
                    merge_delta(total, output)
        if total is None:
            raise RuntimeError("the engine ended a request without a word")
        generation = self._generation
        answer: dict[str, Any] = {
            "id": generation.answer_id,
            "object": OBJECT,
            "created": generation.created,
            "model": generation.model,
            "choices": [
                self._whole_choice(choice, texts[choice.index])
                for choice in sorted(total.outputs, key=lambda c: c.index)
            ],
            "usage": generation.usage.as_dict(),
        }
        if self._request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(total.prompt_logprobs or [None], as_token_ids=self._as_ids)
        if self._with_ids:
            answer["prompt_token_ids"] = total.prompt_token_ids
        return _encode(answer)

    def _whole_choice(self, choice: CompletionOutput, text: WholeText) -> dict[str, Any]:
        member: dict[str, Any] = {
            "index": choice.index,
            "message": text.message(self._prefix),
            "logprobs": self._logprobs_of(choice),
            "finish_reason": text.finish_reason,
            "stop_reason": text.stop_reason,
        }
        if self._with_ids:
            member["token_ids"] = choice.token_ids
        return member


def _last_assistant_text(request: ChatRequest) -> str:
    """The text that the answer goes on from: the last message's, when the assistant wrote it."""
    last = request.messages[-1]
    content = last.get("content")
    if last.get("role") != ROLE or content is None:
        return ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
