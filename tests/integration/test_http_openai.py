"""The official client against a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from hotswap.core.testing.fake_engine import FakeEngine


def client_of(server: Any, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def test_chat_and_completions(live: Callable[..., Any]) -> None:
    server = live()
    with client_of(server) as client:
        assert client.models.list().data[0].id == "tiny"
        assert client.models.retrieve("tiny").id == "tiny"
        messages: Any = [{"role": "user", "content": "abc"}]
        whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
        stream = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens > 8
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
        completion = client.completions.create(model="tiny", prompt="abc", logprobs=2, echo=True)
        assert completion.choices[0].text == "abccba"
        with client.chat.completions.stream(model="tiny", messages=messages) as helper:
            assert (helper.get_final_completion().choices[0].message.content or "").startswith(text)


def test_errors_raise_the_right_class(live: Callable[..., Any]) -> None:
    server = live(api_key=["secret"])
    with client_of(server) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with client_of(server, "secret") as client:
        messages: Any = [{"role": "user", "content": "abc"}]
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=messages)
        assert missing.value.code == "model_not_found" and missing.value.param == "model"
        with pytest.raises(openai.BadRequestError) as long:
            client.completions.create(model="tiny", prompt="x" * 400)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt="x" * 400, stream=True)
        server.engine.fail_after = 2
        with pytest.raises(openai.APIError) as broken:
            list(client.chat.completions.create(model="tiny", messages=messages, stream=True))
        assert "internal" in broken.value.message or "failed" in broken.value.message


def test_many_clients_at_once(live: Callable[..., Any]) -> None:
    """64 streams side by side: the joined deltas are the non-stream text, and usage adds up."""
    server = live(FakeEngine(lambda prompt, choice: prompt[::-1] * 3, step_seconds=0.001))

    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, str, int]:
        prompt = f"number {number} " + "x" * (number % 7)
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=50, stream=True, stream_options={"include_usage": True}
        )
        text, tokens = "", 0
        async for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        whole = await client.completions.create(model="tiny", prompt=prompt, max_tokens=50)
        return text, whole.choices[0].text, tokens

    async def run() -> list[tuple[str, str, int]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(64)))

    results = asyncio.run(run())
    assert all(streamed == whole for streamed, whole, _ in results)
    assert len({streamed for streamed, _, _ in results}) == 64
    assert server.engine.stats.num_running == 0 and not server.engine.aborted
