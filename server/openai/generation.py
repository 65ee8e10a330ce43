"""One call's work on the engine: prompts fanned out, their deltas merged into one stream, usage and metrics counted."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from hotswap.core.errors import RequestError
from hotswap.core.outputs import RequestOutput
from hotswap.core.sampling_params import SamplingParams

from ..engine_surface import ServedEngine
from ..metrics import PromptMetrics, ServerMetrics
from .prompts import Prompt

log = logging.getLogger("hotswap.requests")


@dataclass(slots=True)
class Usage:
    """Tokens of one call; a prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Generation:
    """A call, checked and ready to run.

    Choice `i` of prompt `p` has the index `p * n + i`. `answer_id` is ours and unique; the client's label never is a
    key.
    """

    engine: ServedEngine
    metrics: ServerMetrics
    prompts: list[Prompt]
    params: SamplingParams
    model: str
    id_prefix: str
    request_id: str
    id_label: str | None = None
    priority: int = 0
    user: str = ""
    cache_salt: str | None = None
    log_sizes: bool = False
    usage: Usage = field(default_factory=Usage)
    created: int = field(default_factory=lambda: int(time.time()))
    answer_id: str = ""
    closed_as: str = "abort"  # set by the consumer: how choices count that still run when it closes `deltas`

    def __post_init__(self) -> None:
        self.answer_id = f"{self.id_prefix}-{self.id_label or uuid.uuid4().hex}"

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    async def deltas(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt number, delta) as they come. Closing it aborts everything that still runs.

        Raises RequestError before anything was yielded when a prompt cannot be served, later when the engine gives one
        up.
        """
        source = self._one(0) if len(self.prompts) == 1 else self._merged()
        seen: set[int] = set()
        async with aclosing(source):
            async for number, output in source:
                if number not in seen:
                    seen.add(number)
                    self.usage.prompt_tokens += len(output.prompt_token_ids)
                    self.usage.cached_tokens += output.num_cached_tokens
                self.usage.completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
                yield number, output
        if self.log_sizes:
            log.info(
                "request %s: %d prompts, %d prompt tokens (%d cached), %d choices, %d tokens",
                self.request_id,
                len(self.prompts),
                self.usage.prompt_tokens,
                self.usage.cached_tokens,
                self.num_choices,
                self.usage.completion_tokens,
            )

    async def _one(self, number: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        prompt = self.prompts[number]
        followed = PromptMetrics(self.metrics, self.params.n)
        outcome: str | None = "abort"
        generate = self.engine.generate(
            prompt.token_ids,
            self.params,
            prompt=prompt.text,
            request_id=f"{self.answer_id}-{number}",
            priority=self.priority,
            user=self.user,
            cache_salt=self.cache_salt,
        )
        stream = cast("AsyncGenerator[RequestOutput, None]", generate)  # declared as an iterator, but it has aclose
        try:
            async with aclosing(stream):
                async for output in stream:
                    output.raise_error()
                    followed.observe(output)
                    yield number, output
        except RequestError as error:
            outcome = "error" if followed.started or error.status >= 500 else None
            raise
        except Exception:
            outcome = "error"
            raise
        finally:
            if outcome == "abort":
                outcome = self.closed_as
            if outcome is not None:  # a request refused at admission never was one
                followed.close(outcome)

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """All prompts at once. The queue holds at most one delta each: what comes faster is merged by the engine's
        client."""
        queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(len(self.prompts))

        async def pump(number: int) -> None:
            try:
                async with aclosing(self._one(number)) as stream:
                    async for item in stream:
                        await queue.put(item)
                await queue.put(None)
            except Exception as error:  # noqa: BLE001 - handed to the consumer, which raises it
                await queue.put(error)

        tasks = [asyncio.create_task(pump(number)) for number in range(len(self.prompts))]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
