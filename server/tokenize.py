"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hotswap.core.errors import RequestError
from hotswap.core.text.tools import check_tools

from .openai.prompts import encode_messages, encode_text, is_small, need_tokenizer
from .openai.protocol import DetokenizeRequest, TokenizeRequest
from .openai.routes import Services


async def tokenize(services: Services, http: Request) -> Response:
    """The ids that /v1/completions (prompt) or /v1/chat/completions (messages) would run. Raises RequestError."""
    request = await services.read(http, TokenizeRequest)
    services.state.check_model(request.model)
    engine = services.state.ready_engine()
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if request.prompt is not None:
        # More than the window may be counted: that is what one asks for here.
        ids = await encode_text(
            engine,
            request.prompt,
            add_special_tokens=request.add_special_tokens is not False,
            allow_special=services.state.config.allow_special_tokens_in_prompts,
            truncates=True,
        )
    else:
        tools = None if request.tools is None else check_tools(request.tools)
        ids = (await encode_messages(services.state, engine, request, tools)).token_ids
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": engine.info.max_model_len, "tokens": ids}
    if request.return_token_strs:
        tokenizer = need_tokenizer(engine)
        answer["token_strs"] = [tokenizer.token_string(token_id) for token_id in ids]
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def detokenize(services: Services, http: Request) -> Response:
    """The text of token ids. Raises RequestError."""
    request = await services.read(http, DetokenizeRequest)
    services.state.check_model(request.model)
    engine = services.state.ready_engine()
    tokenizer = need_tokenizer(engine)
    width = engine.info.logits_width
    if request.tokens and not (min(request.tokens) >= 0 and max(request.tokens) < width):
        raise RequestError(f"tokens: an id is outside 0..{width - 1}", param="tokens")
    if is_small(request.tokens):
        text = tokenizer.decode(request.tokens)
    else:
        text = await asyncio.to_thread(tokenizer.decode, request.tokens)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
