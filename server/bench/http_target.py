"""Sends the requests of a run to an OpenAI-compatible server and times what comes back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from .answers import Event, cached_tokens, choice_text, read_event
from .http_client import EXTRAS, Server, ServerFacts, refusal_text
from .measure import Chunk, RequestRecord
from .prompts import Prompt
from .runner import Clock
from .sse import EventParser
from .workload import PlannedRequest


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """extra: fields put over everything else; a None takes the field away. extras: names of EXTRAS to send."""

    chat: bool = False
    stream: bool = True
    temperature: float | None = 0.0
    extras: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    timeout: float = 3600.0


class HttpTarget:
    """A runner's Target."""

    def __init__(self, server: Server, facts: ServerFacts, options: RequestOptions) -> None:
        self._server = server
        self._facts = facts
        self._options = options
        self._url = f"{server.base}/v1/{'chat/completions' if options.chat else 'completions'}"

    def body(self, request: PlannedRequest, prompt: Prompt) -> dict[str, Any]:
        """What is sent."""
        options = self._options
        body: dict[str, Any] = {"model": self._facts.model, "max_tokens": request.output_tokens}
        if options.chat:
            body["messages"] = list(prompt.messages or ())
        else:
            body["prompt"] = list(prompt.token_ids) if prompt.token_ids is not None else prompt.text
        if options.temperature is not None:
            body["temperature"] = options.temperature
        for name in options.extras:
            if name not in ("priority", "user"):
                body |= EXTRAS[name]
        body["stream"] = options.stream
        if not options.stream:
            body.pop("stream_options", None)
        if request.user and "user" in options.extras:
            body["user"] = request.user
        if request.priority and "priority" in options.extras:
            body["priority"] = request.priority
        body |= options.extra
        return {name: value for name, value in body.items() if value is not None}

    async def send(self, request: PlannedRequest, prompt: Prompt, record: RequestRecord, clock: Clock) -> None:
        """As Target.send."""
        content = json.dumps(self.body(request, prompt)).encode()
        headers = {"content-type": "application/json"}
        record.prompt_tokens = len(prompt.token_ids) if prompt.token_ids is not None else request.prompt_tokens
        record.sent = clock()
        try:
            async with asyncio.timeout(self._options.timeout):
                async with self._server.client.stream("POST", self._url, content=content, headers=headers) as reply:
                    await self._read(reply, record, clock)
        except TimeoutError:
            _fail(record, "timeout", f"no end within {self._options.timeout:g} s")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            _fail(record, "no connection", f"{type(error).__name__}: {error}")
        except httpx.TimeoutException as error:
            _fail(record, "timeout", type(error).__name__)
        except httpx.HTTPError as error:
            _fail(record, "broken connection", f"{type(error).__name__}: {error}")
        if record.error is not None:
            record.end = clock()

    async def _read(self, reply: httpx.Response, record: RequestRecord, clock: Clock) -> None:
        if not reply.is_success:
            _fail(record, f"HTTP {reply.status_code}", refusal_text(await reply.aread()))
            return
        if "event-stream" not in reply.headers.get("content-type", ""):
            _read_whole(await reply.aread(), record, clock())
            return
        stream = _Stream(record)
        parser = EventParser()
        async for received in reply.aiter_raw():
            now = clock()
            for data in parser.feed(received):
                stream.take(data, now)
        for data in parser.close():
            stream.take(data, clock())
        stream.close(clock())


class _Stream:
    """Fills a record from the events of a stream."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._text: list[str] = []
        self._ended = False
        self._first_event: float | None = None
        self._counted = 0  # output tokens by the usage of earlier chunks
        self._usage: dict[str, Any] | None = None

    def take(self, data: str, now: float) -> None:
        if data.strip() == "[DONE]":
            self._ended = True
            return
        record, event = self._record, read_event(data)
        if event.error is not None:
            _fail(record, *event.error)
            return
        if event.has_choice and self._first_event is None:
            self._first_event = now
        if event.usage is not None:
            self._usage = event.usage
        tokens = self._tokens_of(event)
        if event.text or event.token_ids or tokens:
            if tokens != 0 or not record.chunks:  # else it is text that was held back, of tokens that have been counted
                record.chunks.append(Chunk(now, tokens or 0))
            self._text.append(event.text)
            record.end = now
        if event.token_ids is not None:
            record.token_ids = (record.token_ids or []) + event.token_ids
        if event.finish_reason is not None:
            record.finish_reason = event.finish_reason
            self._ended = True
            record.end = now
            if not record.chunks:  # an answer without text: its end is the first that was seen of it
                record.chunks.append(Chunk(now, 0))

    def _tokens_of(self, event: Event) -> int | None:
        """Output tokens that this chunk brought, as its ids or a usage that goes on say; None when neither does."""
        total = event.usage.get("completion_tokens") if event.usage is not None else None
        if event.token_ids:
            return len(event.token_ids)
        if not isinstance(total, int) or not event.has_choice:
            return None
        new, self._counted = total - self._counted, total
        return max(0, new)

    def close(self, now: float) -> None:
        record = self._record
        record.text = "".join(self._text)
        if record.error is None and not self._ended:
            _fail(record, "broken stream", "it ended without a finish_reason and without [DONE]")
        elif record.error is None and self._first_event is None:
            _fail(record, "empty answer", "there was no choice in it")
        elif record.error is None and not record.chunks:
            record.end = self._first_event or now
            record.chunks.append(Chunk(record.end, 0))
        _count(record, self._usage, len([text for text in self._text if text]))


def _read_whole(content: bytes, record: RequestRecord, now: float) -> None:
    """An answer in one piece: asked for, or from a server that knows no streams."""
    record.streamed = False
    try:
        value = json.loads(content)
        choices = [choice for choice in value["choices"] if isinstance(choice, dict)]
    except (ValueError, KeyError, TypeError):
        _fail(record, "empty answer", f"neither a stream nor a completion: {content[:100].decode('utf-8', 'replace')}")
        return
    record.text = "".join(choice_text(choice) for choice in choices)
    record.finish_reason = choices[0].get("finish_reason") if choices else None
    ids = choices[0].get("token_ids") if choices else None
    record.token_ids = ids if isinstance(ids, list) else None
    record.end = now
    record.chunks.append(Chunk(now, 0))
    _count(record, value.get("usage") if isinstance(value.get("usage"), dict) else None, 1)


def _count(record: RequestRecord, usage: dict[str, Any] | None, num_chunks: int) -> None:
    """The server's usage where there is one, else ids or chunks with text; a prompt's length is then the planned one."""
    prompt = usage.get("prompt_tokens") if usage is not None else None
    output = usage.get("completion_tokens") if usage is not None else None
    if isinstance(prompt, int):
        record.prompt_tokens = prompt
    if isinstance(output, int):
        record.output_tokens, record.counted_by = output, "usage"
    else:
        record.output_tokens = num_chunks if record.token_ids is None else len(record.token_ids)
        record.counted_by = "chunks" if record.token_ids is None else "usage"
    record.cached_tokens = cached_tokens(usage) if usage is not None else None


def _fail(record: RequestRecord, kind: str, detail: str) -> None:
    """The first failure is the one that counts."""
    if record.error is None:
        record.error, record.error_detail = kind, detail
