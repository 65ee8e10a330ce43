"""The run itself: sends each request when it is due, keeps conversations in order, and watches the client's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hotswap.core.errors import HotswapError
from hotswap.core.load.distribution import Distribution, distribution

from .measure import RequestRecord
from .prompts import Prompt, PromptMaker, Turn
from .workload import PlannedRequest, Workload

LAG_INTERVAL_SECONDS = 0.01
Clock = Callable[[], float]
_Answer = asyncio.Future["Turn | None"]  # None: that turn failed


class Target(Protocol):
    """Who is asked."""

    async def send(self, request: PlannedRequest, prompt: Prompt, record: RequestRecord, clock: Clock) -> None:
        """One request, from now to its last chunk: sets `sent`, `end` and all that comes between. Never raises for a
        failure of the request: that is the record's `error`."""
        ...


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Of the measuring process. lag: how late its event loop woke, sampled every 10 ms. cpu_share: its CPU time over
    wall time (of one core)."""

    lag: Distribution | None
    cpu_share: float


@dataclass(frozen=True, slots=True)
class Run:
    """records: by index. started: seconds since the epoch. interrupted: it was stopped, and only what had ended by then is
    there."""

    records: list[RequestRecord]
    health: ClientHealth
    started: float
    interrupted: bool = False


@dataclass(slots=True)
class Progress:
    """What a progress bar shows; read by whoever draws it."""

    total: int
    done: int = 0
    failed: int = 0
    running: int = 0
    output_tokens: int = 0


class Runner:
    """One run of a workload. max_concurrency: requests in flight at once; None is no limit."""

    def __init__(
        self, target: Target, prompts: PromptMaker, workload: Workload, *, max_concurrency: int | None = None
    ) -> None:
        self._target = target
        self._prompts = prompts
        self._workload = workload
        self._places: contextlib.AbstractAsyncContextManager[None] = (
            asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
        )
        self._ready: dict[int, Prompt] = {}
        self._answers: dict[str, _Answer] = {}
        self._sending: asyncio.Task[None] | None = None
        self._stopped = False
        self.progress = Progress(len(workload.requests))

    async def prepare(self) -> None:
        """Makes every prompt that can be known beforehand, so that the run has little else to do than to send."""
        for request in self._workload.requests:
            if request.turn == 0:
                self._ready[request.index] = await self._prompts.make(request, None)

    async def run(self) -> Run:
        """Raises HotswapError only for what no request can be blamed for."""
        await self.prepare()
        origin = time.perf_counter()

        def clock() -> float:
            return time.perf_counter() - origin

        lags: list[float] = []
        watch = asyncio.create_task(_watch_lag(lags), name="loop-lag")
        cpu, started = time.process_time(), time.time()
        tasks: list[asyncio.Task[RequestRecord]] = []
        self._sending = asyncio.create_task(self._send_all(tasks, clock), name="sending")
        try:
            await self._sending
        except asyncio.CancelledError:
            if not self._stopped:
                raise
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        records = [task.result() for task in tasks if not task.cancelled()]
        health = ClientHealth(distribution(lags), (time.process_time() - cpu) / max(clock(), 1e-9))
        return Run(records, health, started, self._stopped)

    def stop(self) -> bool:
        """Ends the run early: nothing more is sent, and requests in flight are given up. False when nothing was sent yet."""
        if self._sending is None:
            return False
        self._stopped = not self._sending.done()
        self._sending.cancel()
        return True

    async def _send_all(self, tasks: list[asyncio.Task[RequestRecord]], clock: Clock) -> None:
        """Puts a task into `tasks` for each request that is due, and waits for all of them."""
        try:
            async with (
                asyncio.TaskGroup() as group
            ):  # the first failure that is no request's own ends all, arrivals too
                for request in self._workload.requests:
                    while (wait := request.arrival - clock()) > 0:
                        await asyncio.sleep(wait)
                    before, answered = self._neighbours(request)
                    tasks.append(group.create_task(self._one(request, before, answered, clock)))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _neighbours(self, request: PlannedRequest) -> tuple[_Answer | None, _Answer | None]:
        """(what the request waits for, what its conversation's next turn will wait for)"""
        if not request.session:
            return None, None
        before = self._answers.get(request.session)
        answered: _Answer = asyncio.get_running_loop().create_future()
        self._answers[request.session] = answered
        return before, answered

    async def _one(
        self, request: PlannedRequest, before: _Answer | None, answered: _Answer | None, clock: Clock
    ) -> RequestRecord:
        record = RequestRecord(request.index, request.arrival)
        turn: Turn | None = None
        try:
            earlier = await before if before is not None else None
            if before is not None:
                record.due = max(record.due, clock())
            if before is not None and earlier is None:
                _not_sent(record, clock(), "earlier turn failed", "the conversation had broken off")
            else:
                turn = await self._send(request, earlier, record, clock)
        finally:
            if answered is not None and not answered.done():  # it is done when the whole run is being cancelled
                answered.set_result(turn)
        self.progress.done += 1
        self.progress.failed += record.error is not None
        self.progress.output_tokens += record.output_tokens
        return record

    async def _send(
        self, request: PlannedRequest, earlier: Turn | None, record: RequestRecord, clock: Clock
    ) -> Turn | None:
        """The turn for the conversation's next one; None when there cannot be a next one."""
        prompt = self._ready.pop(request.index, None)
        if prompt is None:
            try:
                prompt = await self._prompts.make(request, earlier)
            except HotswapError as error:
                _not_sent(record, clock(), "no prompt", str(error))
                return None
        async with self._places:
            self.progress.running += 1
            try:
                await self._target.send(request, prompt, record, clock)
            finally:
                self.progress.running -= 1
        if record.error is not None:
            return None
        return Turn(prompt, record.text, record.token_ids, record.prompt_tokens, record.output_tokens)


def _not_sent(record: RequestRecord, now: float, kind: str, detail: str) -> None:
    record.sent = record.end = now
    record.error, record.error_detail = kind, detail


async def _watch_lag(lags: list[float]) -> None:
    """Sleeps a little, again and again: what comes on top is time in which nobody's answer could be read either."""
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(LAG_INTERVAL_SECONDS)
        lags.append(max(0.0, time.perf_counter() - begin - LAG_INTERVAL_SECONDS))
