"""Questions to one server for `hotswap compare`: a prompt with greedy sampling, and what it does by default."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

import httpx

from hotswap.core.errors import HotswapError

from .answers import read_event
from .http_client import Refused, Server, ServerFacts, refusal_text
from .side_by_side import Answer, Defaults, published_defaults
from .sse import EventParser

OPEN_PROMPT: Final = "A list of unusual first names and the cities they come from:\n"
RANDOM_SAMPLES: Final = 4
RANDOM_TOKENS: Final = 24
LONGEST_DEFAULT: Final = 256  # tokens: a default length beyond it is reported as "more than"
HELLO: Final = ({"role": "user", "content": "Hello!"},)


async def ask(
    server: Server, facts: ServerFacts, prompt: str, *, chat: bool, max_tokens: int, logprobs: bool
) -> Answer:
    """Greedy, streamed. A refusal or a broken answer is the answer's `error`; raises HotswapError when nobody is there."""
    body: dict[str, Any] = {"model": facts.model, "max_tokens": max_tokens, "temperature": 0}
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": 1}
    else:
        body["prompt"] = prompt
        if logprobs:
            body["logprobs"] = 1
    if facts.extras.get("include_usage"):
        body["stream_options"] = {"include_usage": True}
    return await stream(server, body, chat=chat)


async def stream(server: Server, body: Mapping[str, Any], *, chat: bool, stop_after: int | None = None) -> Answer:
    """Runs one request. stop_after: leave once so many chunks with text have come; finish_reason is then None."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    reading = _Reading(time.perf_counter())
    parser = EventParser()
    try:
        async with server.client.stream("POST", f"{server.base}{path}", json={**body, "stream": True}) as reply:
            if not reply.is_success:
                reading.answer.error = f"HTTP {reply.status_code}: {refusal_text(await reply.aread())}"
                return reading.answer
            async for received in reply.aiter_bytes():
                for data in parser.feed(received):
                    reading.take(data, time.perf_counter())
                if stop_after is not None and reading.chunks >= stop_after:
                    break
        for data in parser.close():
            reading.take(data, time.perf_counter())
    except httpx.ConnectError as error:
        raise HotswapError(f"no server answers at {server.base}: {type(error).__name__}") from None
    except httpx.HTTPError as error:
        reading.answer.error = f"broken connection: {type(error).__name__}"
    return reading.finished()


class _Reading:
    """An answer while its events come."""

    def __init__(self, started: float) -> None:
        self.answer = Answer()
        self.chunks = 0
        self._started = started
        self._tokens: list[str] = []
        self._logprobs: list[float] = []

    def take(self, data: str, now: float) -> None:
        if data.strip() == "[DONE]":
            return
        answer, event = self.answer, read_event(data)
        if event.error is not None:
            answer.error = f"{event.error[0]}: {event.error[1]}"
        if event.text:
            self.chunks += 1
            answer.text += event.text
            answer.total = now - self._started
            answer.ttft = answer.total if answer.ttft is None else answer.ttft
        if event.finish_reason is not None:
            answer.finish_reason = event.finish_reason
            answer.total = now - self._started
        if event.usage is not None:
            answer.prompt_tokens = _whole(event.usage.get("prompt_tokens"))
            answer.output_tokens = _whole(event.usage.get("completion_tokens"))
        for token, value in event.logprobs:
            self._tokens.append(token)
            self._logprobs.append(value)

    def finished(self) -> Answer:
        if self._tokens:
            self.answer.tokens, self.answer.logprobs = self._tokens, self._logprobs
        return self.answer


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


async def learn_defaults(server: Server, facts: ServerFacts, *, completions: bool, chat: bool) -> Defaults:
    """Reads what the server publishes and finds out the rest by asking. Raises HotswapError when it is gone."""
    defaults = Defaults()
    defaults.learn("software", facts.software, "published")
    card = await _card(server, facts.model)
    if facts.max_model_len is not None:
        defaults.learn("max_model_len", facts.max_model_len, "published")
    for name, value in sorted(published_defaults(card).items()):
        defaults.learn(name, value, "published")
    if facts.has_tokenize:
        await _learn_bos(server, facts, defaults)
    if chat:
        await _learn_chat_tokens(server, facts, defaults)
    if completions:
        await _learn_length(server, facts, defaults)
        await _learn_randomness(server, facts, defaults)
    return defaults


async def _card(server: Server, model: str) -> Mapping[str, Any]:
    try:
        return next((card for card in await server.models() if card.get("id") == model), {})
    except HotswapError:
        return {}  # ask_about has already said that there is no list


async def _learn_bos(server: Server, facts: ServerFacts, defaults: Defaults) -> None:
    try:
        plain = await server.tokenize(facts.model, "hello", special=False)
        special = await server.tokenize(facts.model, "hello", special=True)
    except HotswapError:
        return
    defaults.learn("tokens added to a prompt", len(special) - len(plain), "/tokenize")
    defaults.learn("adds BOS", bool(special) and special[: len(plain)] != plain, "/tokenize")


async def _learn_chat_tokens(server: Server, facts: ServerFacts, defaults: Defaults) -> None:
    body = {"model": facts.model, "messages": list(HELLO), "max_tokens": 1, "temperature": 0}
    try:
        answer = await server.post("/v1/chat/completions", body)
    except Refused:
        return
    usage = answer.get("usage") if isinstance(answer, dict) else None
    count = _whole(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
    if count is not None:
        defaults.learn("prompt tokens of a chat with 'Hello!'", count, "usage")


async def _learn_length(server: Server, facts: ServerFacts, defaults: Defaults) -> None:
    """Of a completion that does not say how long it may be. One that ends by itself tells nothing."""
    body: dict[str, Any] = {"model": facts.model, "prompt": OPEN_PROMPT, "temperature": 1.0, "seed": 1}
    if facts.extras.get("ignore_eos"):
        body["ignore_eos"] = True
    if facts.extras.get("include_usage"):
        body["stream_options"] = {"include_usage": True}
    answer = await stream(server, body, chat=False, stop_after=LONGEST_DEFAULT)
    if answer.error is not None:
        return
    if answer.finish_reason == "length" and answer.output_tokens is not None:
        defaults.learn("max_tokens of a completion", answer.output_tokens, "found by asking")
    elif answer.finish_reason is None:
        defaults.learn("max_tokens of a completion", f"more than {LONGEST_DEFAULT}", "found by asking")


async def _learn_randomness(server: Server, facts: ServerFacts, defaults: Defaults) -> None:
    """The same open question, again and again, without a temperature or a seed."""
    body = {"model": facts.model, "prompt": OPEN_PROMPT, "max_tokens": RANDOM_TOKENS}
    texts = []
    for _ in range(RANDOM_SAMPLES):
        answer = await stream(server, body, chat=False)
        if answer.error is not None:
            return
        texts.append(answer.text)
    how = f"found by asking {RANDOM_SAMPLES} times"
    defaults.learn("sampling", "random" if len(set(texts)) > 1 else "always the same", how)
