"""Sends the requests of a run to an engine of our own, without HTTP, and samples its gauges meanwhile."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from hotswap.core.engine.wire import EngineStats
from hotswap.core.errors import HotswapError, RequestError
from hotswap.core.sampling_params import SamplingParams

from .measure import Chunk, RequestRecord
from .prompts import WORDS, Prompt
from .runner import Clock
from .workload import PlannedRequest

if TYPE_CHECKING:
    from hotswap.core.outputs import RequestOutput

    from ..engine_surface import ServedEngine

SAMPLE_SECONDS = 0.1


class EngineTarget:
    """A runner's Target. sampling: for every request; its max_tokens and ignore_eos are set here.

    Priorities count only under a policy that serves by them; the others would refuse the request.
    Text is not made unless `detokenize`: a run measures the engine, and nobody reads.
    """

    def __init__(self, engine: ServedEngine, sampling: dict[str, Any], *, detokenize: bool = False) -> None:
        self._engine = engine
        self._sampling = {**sampling, "detokenize": detokenize}
        if not detokenize:
            self._sampling.pop("stop", None)

    async def send(self, request: PlannedRequest, prompt: Prompt, record: RequestRecord, clock: Clock) -> None:
        """As Target.send."""
        record.counted_by, record.token_ids = "engine", []
        record.sent = clock()
        try:
            ids = self._ids(prompt)
            record.prompt_tokens = len(ids)
            params = SamplingParams(**{**self._sampling, "max_tokens": request.output_tokens})
            stream = cast(
                "AsyncGenerator[RequestOutput, None]",
                self._engine.generate(
                    ids,
                    params,
                    request_id=f"bench-{uuid.uuid4().hex}",
                    priority=request.priority if self._engine.info.uses_priority else 0,
                    user=request.user,
                ),
            )
            async with aclosing(stream):
                async for output in stream:
                    output.raise_error()
                    self._take(output, record, clock())
        except RequestError as error:
            record.error, record.error_detail, record.end = f"refused ({error.status})", error.message, clock()
        if record.error is None and not record.chunks:
            record.chunks.append(Chunk(record.end, 0))

    def _take(self, output: RequestOutput, record: RequestRecord, now: float) -> None:
        record.end = now
        record.cached_tokens = max(record.cached_tokens or 0, output.num_cached_tokens)
        token_ids = record.token_ids if record.token_ids is not None else []
        record.token_ids = token_ids
        for choice in output.outputs:
            if choice.token_ids:
                record.chunks.append(Chunk(now, len(choice.token_ids)))
                token_ids.extend(choice.token_ids)
            record.output_tokens += len(choice.token_ids)
            record.finish_reason = choice.finish_reason or record.finish_reason

    def _ids(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError("a prompt of text needs a tokenizer")
        if prompt.text is not None:
            return tokenizer.encode(prompt.text)
        template = self._engine.chat_template
        if template is None:
            raise RequestError("a prompt of messages needs a chat template")
        return tokenizer.encode_chat(template.render(list(prompt.messages or ())))


def token_pool(engine: ServedEngine) -> list[int]:
    """Ids of common words; without a tokenizer, all that the model has rows for."""
    if engine.tokenizer is None:
        return list(range(engine.info.logits_width))
    return sorted(set(engine.tokenizer.encode(" " + " ".join(WORDS), add_special_tokens=False)))


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Of a run: counters are its own (after less before), gauges the highest and the mean of samples taken every 0.1 s.

    steps, scheduled_tokens: of the engine; a recomputed token counts each time. kv_usage, kv_waste: shares, 0 to 1.
    """

    steps: int
    scheduled_tokens: int
    tokens_per_step: float
    preemptions_recompute: int
    preemptions_swap: int
    prefix_queries: int
    prefix_hits: int
    kv_usage_peak: float
    kv_usage_mean: float
    kv_waste_mean: float
    running_peak: int
    waiting_peak: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class EngineWatch:
    """`async with` around a run."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._before = EngineStats()
        self._after = EngineStats()
        self._samples: list[tuple[float, float, int, int]] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EngineWatch:
        self._before = await current_stats(self._engine)
        self._task = asyncio.create_task(self._sample(), name="engine-gauges")
        return self

    async def __aexit__(self, *details: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._engine.state == "ready":
            self._after = await current_stats(self._engine)

    async def _sample(self) -> None:
        while True:
            stats = self._engine.stats
            self._samples.append((stats.kv_usage, stats.kv_waste, stats.num_running, stats.num_waiting))
            await asyncio.sleep(SAMPLE_SECONDS)

    def report(self) -> EngineReport:
        before, after = self._before, self._after
        usage, waste, running, waiting = zip(*(self._samples or [(0.0, 0.0, 0, 0)]), strict=True)
        steps = after.num_steps - before.num_steps
        tokens = after.num_scheduled_tokens - before.num_scheduled_tokens
        return EngineReport(
            steps=steps,
            scheduled_tokens=tokens,
            tokens_per_step=tokens / max(1, steps),
            preemptions_recompute=after.num_preemptions_recompute - before.num_preemptions_recompute,
            preemptions_swap=after.num_preemptions_swap - before.num_preemptions_swap,
            prefix_queries=after.prefix_queries - before.prefix_queries,
            prefix_hits=after.prefix_hits - before.prefix_hits,
            kv_usage_peak=max(usage),
            kv_usage_mean=sum(usage) / len(usage),
            kv_waste_mean=sum(waste) / len(waste),
            running_peak=max(running),
            waiting_peak=max(waiting),
        )


async def current_stats(engine: ServedEngine) -> EngineStats:
    """From the engine itself: what the client holds may be half a second old. Raises HotswapError."""
    try:
        return msgspec.convert(await engine.call("stats"), EngineStats)
    except msgspec.ValidationError as error:
        raise HotswapError(f"the engine's stats cannot be read: {error}") from None
