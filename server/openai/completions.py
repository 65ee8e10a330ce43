"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hotswap.core.engine.output_processor import merge_delta
from hotswap.core.errors import RequestError
from hotswap.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from hotswap.core.text.detokenizer import IncrementalDetokenizer

from .generation import Generation
from .logprobs import CompletionLogprobs, prompt_logprobs
from .prompts import encode_prompts, split_prompts
from .protocol import CompletionRequest, check_response_format
from .routes import Services, answer, check_streaming
from .sampling import COMPLETION_MAX_TOKENS, num_choices, requested_max_tokens, sampling_params
from .streaming import ChunkWriter, encode_member, end_of_choice

_encode = msgspec.json.encode
OBJECT = "text_completion"


async def create_completion(services: Services, http: Request) -> Response:
    """Raises RequestError, BodyRefused, EngineDeadError."""
    request = await services.read(http, CompletionRequest)
    engine = services.state.ready_engine()
    model = services.state.check_model(request.model)
    _check(request)
    prompts = split_prompts(request.prompt)
    num_choices(request, len(prompts), services.state.config.max_requests_per_call)
    params = sampling_params(
        request,
        engine.generation_defaults,
        default_max_tokens=COMPLETION_MAX_TOKENS,
        logprobs=request.logprobs,
        has_text=engine.tokenizer is not None,
    )
    if request.echo and request.logprobs is not None and params.prompt_logprobs is None:
        params = params.clone(prompt_logprobs=request.logprobs)
    encoded = await encode_prompts(services.state, request, prompts, engine)
    generation = services.generation(http, request, encoded, params, model, "cmpl")
    echo = _Echo(generation, request) if request.echo else None
    work = _Completion(generation, request, echo)
    return await answer(services, http, generation, request, work.frames, work.whole)


def _check(request: CompletionRequest) -> None:
    if request.suffix:
        raise RequestError(
            "suffix needs a model that fills in the middle; this one continues text only", param="suffix"
        )
    if requested_max_tokens(request) == 0 and not request.echo:
        raise RequestError("max_tokens is 0, which is only of use with echo: it scores the prompt", param="max_tokens")
    check_response_format(request.response_format)
    check_streaming(request)


class _Echo:
    """The prompt as the answer shows it."""

    def __init__(self, generation: Generation, request: CompletionRequest) -> None:
        tokenizer = generation.engine.tokenizer
        if tokenizer is None:
            raise RequestError("echo needs a tokenizer, and this server runs without one", param="echo")
        self._tokenizer = tokenizer
        self._skip = request.skip_special_tokens is not False
        self.hidden = tokenizer.special_ids if self._skip else frozenset[int]()
        self._prompts = generation.prompts

    def text(self, number: int) -> str:
        prompt = self._prompts[number]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=self._skip)

    def first_token(self, token_id: int) -> tuple[int, str, bytes]:
        """The prompt's first token, which has no logprob of its own."""
        pieces = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False, continuation=False)
        piece = pieces.feed_piece(token_id)
        return token_id, piece.text, piece.bytes


class _Completion:
    """One call's answer, whole or in chunks."""

    def __init__(self, generation: Generation, request: CompletionRequest, echo: _Echo | None) -> None:
        self._generation = generation
        self._request = request
        self._echo = echo
        self._as_ids = request.return_tokens_as_token_ids is True
        self._with_ids = request.return_token_ids is True
        self._wants_logprobs = request.logprobs is not None
        tokenizer = generation.engine.tokenizer
        skip = request.skip_special_tokens is not False
        hidden = tokenizer.special_ids if tokenizer is not None and skip else frozenset[int]()
        self._scored: set[int] = set()  # prompts whose scores have been sent
        self._held: dict[int, RequestOutput] = {}  # by prompt: deltas that wait for them
        self._logprobs = [CompletionLogprobs(hidden, as_token_ids=self._as_ids) for _ in range(generation.num_choices)]

    def _prompt_part(self, output: RequestOutput) -> list[TokenLogprobs | None]:
        """The echoed prompt's positions, when they are asked for."""
        if self._echo is None or not self._wants_logprobs:
            return []
        if output.prompt_logprobs is None:
            if len(output.prompt_token_ids) > 1:
                raise RuntimeError("the first delta came without the prompt's logprobs")
            return [None]
        return list(output.prompt_logprobs)

    def _logprobs_of(
        self, index: int, output: RequestOutput, new: Sequence[TokenLogprobs] | None, prompt: list[TokenLogprobs | None]
    ) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        first = self._echo.first_token(output.prompt_token_ids[0]) if prompt and self._echo is not None else None
        return self._logprobs[index].add([*prompt, *(new or ())], first)

    # In chunks.

    async def frames(self) -> AsyncGenerator[bytes, None]:
        generation, n = self._generation, self._generation.params.n
        writer = ChunkWriter(generation, OBJECT, self._request.stream_options)
        greeted: set[int] = set()
        prompts: dict[int, list[TokenLogprobs | None]] = {}
        async for number, delta in generation.deltas():
            output = self._after_prompt(number, delta)
            if output is None:
                continue
            if number not in prompts:
                prompts[number] = self._prompt_part(output)
            parts = []
            for choice in output.outputs:
                index = number * n + choice.index
                first = index not in greeted
                greeted.add(index)
                payload = self._chunk(index, number, output, choice, first, prompts[number] if first else [])
                if payload is not None:
                    parts.append(writer.choice(index, payload))
            if parts:
                yield b"".join(parts)
        yield writer.last()

    def _after_prompt(self, number: int, delta: RequestOutput) -> RequestOutput | None:
        """The delta, or None while the prompt's scores, which come first in a stream, are still awaited: choice 0 brings
        them, and another choice may be faster."""
        if self._echo is None or not self._wants_logprobs or number in self._scored:
            return delta
        held = self._held.pop(number, None)
        if held is not None:
            merge_delta(held, delta)
            delta = held
        if delta.prompt_logprobs is None and len(delta.prompt_token_ids) > 1 and not delta.finished:
            self._held[number] = delta
            return None
        self._scored.add(number)
        return delta

    def _chunk(
        self,
        index: int,
        number: int,
        output: RequestOutput,
        choice: CompletionOutput,
        first: bool,
        prompt: list[TokenLogprobs | None],
    ) -> bytes | None:
        """The choice's members; None when there is nothing to say (its text is held back)."""
        text = choice.text
        if first and self._echo is not None:
            text = self._echo.text(number) + text
        if not text and choice.finish_reason is None and not first and not (self._wants_logprobs or self._with_ids):
            return None
        parts = [b'"text":', _encode(text), b',"logprobs":']
        parts.append(_encode(self._logprobs_of(index, output, choice.logprobs, prompt)))
        parts.append(end_of_choice(choice.finish_reason, choice.stop_reason))
        if self._with_ids:
            parts.append(encode_member(b"token_ids", choice.token_ids))
            if first:
                parts.append(encode_member(b"prompt_token_ids", output.prompt_token_ids))
        return b"".join(parts)

    # Whole.

    async def whole(self) -> bytes:
        totals: dict[int, RequestOutput] = {}
        async for number, output in self._generation.deltas():
            if number in totals:
                merge_delta(totals[number], output)
            else:
                totals[number] = output
        choices = [
            self._whole_choice(number, totals[number], choice)
            for number in sorted(totals)
            for choice in sorted(totals[number].outputs, key=lambda c: c.index)
        ]
        generation = self._generation
        return _encode(
            {
                "id": generation.answer_id,
                "object": OBJECT,
                "created": generation.created,
                "model": generation.model,
                "choices": choices,
                "usage": generation.usage.as_dict(),
            }
        )

    def _whole_choice(self, number: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        index = number * self._generation.params.n + choice.index
        text = choice.text if self._echo is None else self._echo.text(number) + choice.text
        member: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs_of(index, output, choice.logprobs, self._prompt_part(output)),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._request.prompt_logprobs is not None:
            member["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [None], as_token_ids=self._as_ids)
        if self._with_ids:
            member["token_ids"] = choice.token_ids
            member["prompt_token_ids"] = output.prompt_token_ids
        return member
