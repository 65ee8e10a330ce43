"""What the client sends as a prompt, to token ids. Long texts are tokenized off the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from hotswap.core.errors import RequestError
from hotswap.core.sampling_params import INTEGER_BOUNDS
from hotswap.core.text.tokenizer import RenderedPrompt, Tokenizer

from ..engine_surface import ServedEngine
from ..state import ServerState
from .protocol import ChatRequest, CompletionRequest, SamplingFields, TokenizeRequest

INLINE_CHARS = 4096  # a shorter text is tokenized faster than a thread is reached
ITEM_CHARS = 4  # what a list's item costs beside its text, in characters
MAX_BYTES_PER_TOKEN = 512  # no vocabulary seen has a longer token; a text over window * this cannot fit


@dataclass(frozen=True, slots=True)
class Prompt:
    """token_ids: what the engine runs. text: what the client wrote, None when it sent token ids."""

    token_ids: list[int]
    text: str | None = None


def split_prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a completion request: a string, a list of strings, token ids, or a list of lists of token ids.

    Raises RequestError (400) for anything else, mixed lists and empty ones among it.
    """
    if value is None:
        raise RequestError("prompt is required", param="prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError(
            "prompt must be a string, a list of strings, token ids, or a list of lists of token ids", param="prompt"
        )
    if not value:
        raise RequestError("prompt is an empty list", param="prompt")
    if type(value[0]) is int:
        _check_ids(value, "prompt")
        return [value]
    kind = type(value[0])
    for number, item in enumerate(value):
        where = f"prompt[{number}]"
        if type(item) is not kind or kind not in (str, list):
            raise RequestError(
                f"{where} must be {_EXPECTED.get(kind, 'a string, a token id or a list of token ids')}", param=where
            )
        if kind is list:
            if not item:
                raise RequestError(f"{where} is an empty list", param=where)
            _check_ids(item, where)
    return list(value)


_EXPECTED: dict[type[Any], str] = {str: "a string, like the first one", list: "a list of token ids, like the first one"}


def _check_ids(ids: list[Any], where: str) -> None:
    if any(type(token_id) is not int for token_id in ids):
        raise RequestError(f"{where} must hold integers only: it starts as a list of token ids", param=where)


async def encode_prompts(
    state: ServerState, request: CompletionRequest, prompts: list[str | list[int]], engine: ServedEngine
) -> list[Prompt]:
    """Raises RequestError (400)."""
    add_special_tokens = request.add_special_tokens is not False
    inline = is_small(prompts)  # together: many short texts keep the event loop as long as a long one
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = await encode_text(
                engine,
                prompt,
                add_special_tokens=add_special_tokens,
                allow_special=state.config.allow_special_tokens_in_prompts,
                truncates=_truncates(request),
                inline=inline,
            )
            if not ids:
                raise RequestError("the prompt is empty: it must hold at least one token", param="prompt")
            encoded.append(_truncated(Prompt(ids, prompt), request))
        else:
            encoded.append(_truncated(Prompt(prompt), request))
    return encoded


async def encode_text(
    engine: ServedEngine,
    text: str,
    *,
    add_special_tokens: bool,
    allow_special: bool,
    truncates: bool = False,
    inline: bool = True,
) -> list[int]:
    """Token ids of raw text. Raises RequestError (400).

    allow_special: special-token strings in it are tokens (--allow-special-tokens-in-prompts), not plain text.
    inline: False when it is one of so many texts that together they are long.
    """
    tokenizer = need_tokenizer(engine)
    _check_length(engine, text, truncates)
    if inline and len(text) <= INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens, allow_special=allow_special)
    return await asyncio.to_thread(
        tokenizer.encode, text, add_special_tokens=add_special_tokens, allow_special=allow_special
    )


async def encode_messages(
    state: ServerState,
    engine: ServedEngine,
    request: ChatRequest | TokenizeRequest,
    tools: list[dict[str, Any]] | None,
) -> Prompt:
    """Renders a conversation and tokenizes it. Raises RequestError (400).

    tools: what the template shows of the request's, as `check_tools` gives them.
    `add_special_tokens` changes nothing here: a chat prompt has exactly one BOS when the tokenizer adds one.
    """
    tokenizer = need_tokenizer(engine)
    template = engine.chat_template
    if template is None:
        raise RequestError(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template"
        )
    documents = getattr(request, "documents", None)
    template_of_request = request.chat_template
    if tools is not None and template_of_request is None:
        template.need_tools()
    inline = template_of_request is None and is_small(
        [request.messages, documents, request.chat_template_kwargs, tools]
    )
    messages = [_with_known_role(message) for message in request.messages or []]
    size = sum(_text_size(message.get("content")) for message in messages)
    truncates = isinstance(request, SamplingFields) and _truncates(request)
    limit = _max_chars(engine)
    if size > limit and not truncates:
        raise _too_long(engine)

    def work() -> list[int]:
        rendered: RenderedPrompt = template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message is True,
            template_kwargs=request.chat_template_kwargs,
            request_template=template_of_request,
            trust_request_template=state.config.trust_request_chat_template,
            allow_special=state.config.allow_special_tokens_in_prompts,
        )
        return tokenizer.encode_chat(rendered)

    ids = work() if inline else await asyncio.to_thread(work)
    prompt = Prompt(ids)
    return _truncated(prompt, request) if isinstance(request, SamplingFields) else prompt


def is_small(value: Any) -> bool:
    """Whether JSON data is so little that work on it may be done on the event loop. Looks no further than it must."""
    left, size = [value], 0
    while left and size <= INLINE_CHARS:
        item = left.pop()
        size += len(item) if isinstance(item, str) else ITEM_CHARS
        if isinstance(item, dict):
            left.extend(item.values())
            size += sum(map(len, item))
        elif isinstance(item, list):
            size += ITEM_CHARS * len(item)
            left.extend(item[:INLINE_CHARS])
    return size <= INLINE_CHARS


def need_tokenizer(engine: ServedEngine) -> Tokenizer:
    """Raises RequestError (400) when the engine serves token ids only."""
    if engine.tokenizer is None:
        raise RequestError("this server runs without a tokenizer: send token ids to /v1/completions", param="prompt")
    return engine.tokenizer


def _with_known_role(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's newer name for the system's role; templates know the old one."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _text_size(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(
            len(part["text"]) for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return 0


def _truncates(request: SamplingFields) -> bool:
    return request.truncate_prompt_tokens is not None


def _truncated(prompt: Prompt, request: SamplingFields) -> Prompt:
    """The last `truncate_prompt_tokens` tokens. The text, if cut, is no longer what the client wrote."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompt
    lowest, highest = INTEGER_BOUNDS["truncate_prompt_tokens"]
    if not lowest <= keep <= highest:
        raise RequestError(
            f"truncate_prompt_tokens must be between {lowest} and {highest}", param="truncate_prompt_tokens"
        )
    return prompt if len(prompt.token_ids) <= keep else Prompt(prompt.token_ids[-keep:])


def _max_chars(engine: ServedEngine) -> int:
    return engine.info.max_model_len * MAX_BYTES_PER_TOKEN


def _check_length(engine: ServedEngine, text: str, truncates: bool) -> None:
    """Refuses by size alone what could not fit, before the work of tokenizing it (S-45)."""
    if not truncates and len(text) > _max_chars(engine):
        raise _too_long(engine)


def _too_long(engine: ServedEngine) -> RequestError:
    return RequestError(
        f"the prompt is longer than the {engine.info.max_model_len} tokens of this server's context window",
        param="prompt",
        code="context_length_exceeded",
    )
