"""Who answers in `hotswap chat`: a running server, or an engine that belongs to the chat."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any, cast

from hotswap.core.config import EngineConfig
from hotswap.core.errors import HotswapError

from .local_engine import local_engine
from .settings import Settings

if TYPE_CHECKING:
    import httpx

    from hotswap.core.outputs import RequestOutput

    from ..starting import StartableEngine


class RemoteBackend:
    """A server with OpenAI's protocol: ours or another one."""

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        import httpx

        base = url.rstrip("/")
        if "://" not in base:
            base = f"http://{base}"
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(10.0, read=None))
        self._model = model
        self.name = url

    async def open(self) -> None:
        if self._model is None:
            import httpx

            try:
                reply = await self._client.get(f"{self._base}/models")
                await _check(reply)
                self._model = reply.json()["data"][0]["id"]
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise HotswapError(f"no server answers at {self._base}: {type(error).__name__}") from None
            except (KeyError, IndexError, TypeError, ValueError):
                raise HotswapError(f"{self._base}/models does not list a model: is this an OpenAI server?") from None
        self.name = f"{self._model} at {self._base}"

    async def answer(self, messages: list[dict[str, Any]], settings: dict[str, Any]) -> AsyncGenerator[str, None]:
        import httpx

        body = {"model": self._model, "messages": messages, "stream": True, **settings}
        try:
            async with self._client.stream("POST", f"{self._base}/chat/completions", json=body) as reply:
                await _check(reply)
                async for line in reply.aiter_lines():
                    delta = _delta_of(line)
                    if delta:
                        yield delta
        except httpx.HTTPError as error:
            raise HotswapError(f"the connection to {self._base} broke: {type(error).__name__}") from None

    async def close(self) -> None:
        await self._client.aclose()


def _delta_of(line: str) -> str:
    """The text in one line of an event stream. Raises HotswapError for an error event."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return ""
    event = json.loads(data)
    if "error" in event:
        raise HotswapError(f"the server broke off: {event['error'].get('message', 'no reason given')}")
    choices = event.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


async def _check(reply: httpx.Response) -> None:
    if reply.is_success:
        return
    try:
        message = json.loads(await reply.aread())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = "no reason given"
    raise HotswapError(f"the server refuses ({reply.status_code}): {message}")


class LocalBackend:
    """An engine process of our own, without HTTP."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._config = config = settings.build(EngineConfig)
        self._stack = AsyncExitStack()  # ends the engine
        self._engine: StartableEngine | None = None
        self.name = (config.model.served_model_name or [config.model.model])[0]

    async def open(self) -> None:
        self._engine = await self._stack.enter_async_context(local_engine(self._settings, self._config))
        if self._engine.tokenizer is None or self._engine.chat_template is None:
            raise HotswapError(f"{self.name} has no chat template: give one with --chat-template")

    async def answer(self, messages: list[dict[str, Any]], settings: dict[str, Any]) -> AsyncGenerator[str, None]:
        from hotswap.core.sampling_params import SamplingParams

        engine = self._engine
        if engine is None or engine.tokenizer is None or engine.chat_template is None:
            raise HotswapError("the engine is not open")
        ids = engine.tokenizer.encode_chat(engine.chat_template.render(messages))
        params = SamplingParams(**{"max_tokens": None, **engine.generation_defaults, **settings})
        stream = cast(
            "AsyncGenerator[RequestOutput, None]", engine.generate(ids, params, request_id=f"chat-{uuid.uuid4().hex}")
        )
        async with aclosing(stream):
            async for output in stream:
                output.raise_error()
                yield "".join(choice.text for choice in output.outputs)

    async def close(self) -> None:
        await self._stack.aclose()
