"""The async front end against a made-up engine at the other end of its sockets: deaths, faults of one request, start-up."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq
import zmq.asyncio

from hotswap.core.clock import Clock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.scheduler import RequestUpdate
from hotswap.core.engine.client import EngineClient
from hotswap.core.engine.front_end import FrontEnd
from hotswap.core.engine.input_processor import InputLimits, InputProcessor
from hotswap.core.engine.launch import EngineProcess
from hotswap.core.engine.output_processor import OutputProcessor, merge_delta
from hotswap.core.engine.wire import (
    AbortRequests,
    Call,
    EngineInfo,
    EngineMessage,
    EngineRequest,
    FrontMessage,
    Heartbeat,
    Outputs,
    Ready,
    Reply,
    StartupProgress,
)
from hotswap.core.errors import EngineDeadError, HotswapError, ModelLoadError, UsageError
from hotswap.core.outputs import RequestOutput
from hotswap.core.sampling_params import SamplingParams

INFO = EngineInfo("tiny", "Tiny", "float32", 64, 63, 512, 16, 16, 4, 64, "cpu")


class MadeUpProcess:
    """Stands for the child: it ends when told."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hs-"))
        self.input_address = f"ipc://{self.folder / 'in'}"
        self.output_address = f"ipc://{self.folder / 'out'}"
        self.status = 0
        self._ended = threading.Event()

    def end(self, status: int) -> None:
        self.status = status
        self._ended.set()

    def wait(self) -> int:
        self._ended.wait(20)
        return self.status

    def close(self, timeout_s: float = 5.0, *, wait_s: float = 0.0) -> None:
        self._ended.set()
        shutil.rmtree(self.folder, ignore_errors=True)


class EngineSide:
    """The two sockets as the engine process has them."""

    def __init__(self, process: MadeUpProcess) -> None:
        self.process = process
        self._context = zmq.asyncio.Context()
        self._inputs = self._context.socket(zmq.PULL)
        self._inputs.connect(process.input_address)
        self._outputs = self._context.socket(zmq.PUSH)
        self._outputs.connect(process.output_address)

    async def send(self, message: EngineMessage) -> None:
        await self._outputs.send(msgspec.msgpack.encode(message))

    async def receive(self) -> Any:
        frame = await asyncio.wait_for(self._inputs.recv(), 5)
        return msgspec.msgpack.decode(frame, type=FrontMessage)

    async def vanish(self) -> None:
        """As when the process is killed: the other end sees that nobody is connected."""
        self._context.destroy(linger=0)
        await asyncio.sleep(0.1)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[EngineClient, EngineSide]]:
    process = MadeUpProcess()
    front = SimpleNamespace()

    def connect(info: EngineInfo, clock: Clock) -> None:
        front.info = info
        front.inputs = InputProcessor(info, None, (), clock, InputLimits())
        front.outputs = OutputProcessor(None)

    front.connect = connect
    client = EngineClient(cast(EngineProcess, process), cast(FrontEnd, front), EngineConfig.from_flat())
    side = EngineSide(process)
    try:
        yield client, side
    finally:
        await asyncio.wait_for(client.shutdown(), 5)
        await side.vanish()


async def started(client: EngineClient, side: EngineSide) -> None:
    await side.send(Ready(INFO))
    await asyncio.wait_for(client.start(), 5)


async def collect(client: EngineClient, prompt: list[int]) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=4, detokenize=False)
    return [output async for output in client.generate(prompt, params, request_id="label")]


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 15))


def test_a_request_sent_to_an_engine_that_is_gone_hears_of_the_death() -> None:
    """The socket is down before the exit is noticed: what is sent in between must not wait for ever."""

    async def scenario() -> None:
        async with pair() as (client, side):
            await started(client, side)
            await side.vanish()
            request = asyncio.create_task(collect(client, [1, 2]))
            call = asyncio.create_task(client.call("stats"))
            await asyncio.sleep(0.1)
            side.process.end(-9)
            for task in (request, call):
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await asyncio.wait_for(task, 3)

    run(scenario)


def test_shutdown_ends_although_the_engine_is_gone() -> None:
    async def scenario() -> None:
        async with pair() as (client, side):
            await started(client, side)
            await side.vanish()
            await asyncio.wait_for(client.shutdown(), 3)

    run(scenario)


def test_a_fault_in_one_requests_text_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with pair() as (client, side):
            await started(client, side)
            requests = [asyncio.create_task(collect(client, [number])) for number in (1, 2)]
            sent: list[EngineRequest] = [await side.receive(), await side.receive()]
            outputs = client._front.outputs
            apply = outputs.apply

            def failing(update: RequestUpdate) -> Any:
                if update.request_id == sent[0].request_id:
                    raise ZeroDivisionError("a bug")
                return apply(update)

            monkeypatch.setattr(outputs, "apply", failing)
            for reason in (None, "length"):
                await side.send(Outputs([RequestUpdate(request.request_id, [7], reason) for request in sent]))
            broken, whole = await asyncio.wait_for(asyncio.gather(*requests), 3)
            assert broken[-1].finished and broken[-1].error and broken[-1].error_status == 500
            assert "a bug" not in broken[-1].error
            assert [i for output in whole for choice in output.outputs for i in choice.token_ids] == [7, 7]
            assert await side.receive() == AbortRequests([sent[0].request_id])
            assert len(outputs) == 0 and client.num_requests == 0 and client.health() is None

    run(scenario)


def test_a_receiver_that_fails_is_a_death_and_not_a_hang() -> None:
    async def scenario() -> None:
        async with pair() as (client, side):

            def broken_display(message: StartupProgress) -> None:
                raise BrokenPipeError("nobody reads standard error")

            client.on_progress = broken_display
            await side.send(StartupProgress("weights", 1, 2))
            with pytest.raises(ModelLoadError, match="BrokenPipeError"):
                await asyncio.wait_for(client.start(), 3)
            assert client.state == "dead"

    run(scenario)


def test_ready_means_that_requests_can_be_made() -> None:
    """Between the engine's word and the front end's own preparation, a request is still told that it is too early."""

    async def scenario() -> None:
        async with pair() as (client, side):
            seen: list[str] = []
            connect = client._front.connect

            def watched(info: EngineInfo, clock: Clock) -> None:
                seen.append(client.state)
                connect(info, clock)

            client._front.connect = watched  # type: ignore[method-assign, assignment]
            await started(client, side)
            assert [*seen, client.state] == ["starting", "ready"]

    run(scenario)


def test_an_exit_without_a_word_keeps_its_status() -> None:
    async def scenario() -> None:
        async with pair() as (client, side):
            side.process.end(2)
            with pytest.raises(UsageError, match="status 2"):
                await asyncio.wait_for(client.start(), 3)

    run(scenario)


def test_prompt_logprobs_come_with_choice_0_even_when_it_is_slower() -> None:
    from hotswap.core.contracts.plan import PositionLogprobs

    outputs = OutputProcessor(None)
    params = SamplingParams(max_tokens=4, detokenize=False, prompt_logprobs=0)
    requests = [EngineRequest(number, [5, 6], params, 0.0) for number in (1, 2)]
    state = outputs.add("label", None, requests)
    prompt = [PositionLogprobs([6], [-1.0], [1])]
    first = outputs.apply(RequestUpdate(2, [7]))
    second = outputs.apply(RequestUpdate(1, [7], prompt_logprobs=prompt))
    assert first is not None and first[0] is state and first[1].prompt_logprobs is None
    assert second is not None and second[1].prompt_logprobs is not None
    merge_delta(first[1], second[1])
    assert first[1].prompt_logprobs == second[1].prompt_logprobs


def test_a_backlog_from_the_engine_leaves_the_loop_to_others() -> None:
    """Receiving what is there already does not suspend a task: it must give way by itself."""

    async def scenario() -> None:
        async with pair() as (client, side):
            await started(client, side)
            handled = 0

            def counting(message: EngineMessage) -> None:
                nonlocal handled
                handled += 1

            client._handle = counting  # type: ignore[method-assign]
            context = zmq.Context()
            socket = context.socket(zmq.PUSH)
            socket.connect(side.process.output_address)
            for _ in range(500):
                socket.send(msgspec.msgpack.encode(Outputs([])))
            socket.close(linger=2000)
            context.term()  # all of it is with the client now, which has not had a turn
            seen = [0]
            while handled < 500:
                await asyncio.sleep(0)
                seen.append(handled)
            assert max(after - before for before, after in itertools.pairwise(seen)) < 50

    run(scenario)


def test_s41_health_is_the_age_of_the_last_step_and_every_thread_is_watched() -> None:
    async def scenario() -> None:
        async with pair() as (client, side):
            await started(client, side)
            limit = client._config.engine_stuck_timeout

            async def after(heartbeat: Heartbeat) -> str | None:
                await side.send(heartbeat)
                while client._heartbeat != heartbeat:
                    await asyncio.sleep(0.01)
                return client.health()

            assert await after(Heartbeat(limit - 1)) is None
            assert await after(Heartbeat(limit + 1)) == "the engine is stuck: no step has ended for 301 s"
            assert await after(Heartbeat(0.1)) is None
            dead = await after(Heartbeat(0.1, ["parent-watch"]))
            assert dead == "threads of the engine have ended: parent-watch"
            assert await after(Heartbeat(0.2)) is None
            client._last_message -= limit + 5
            assert "nothing was heard from it for 305 s" in (client.health() or "")
            client._last_message += limit + 5
            client._tasks[0].cancel()
            await asyncio.sleep(0.01)
            assert "background task" in (client.health() or "")

    run(scenario)


def test_s41_the_limit_is_a_setting() -> None:
    assert EngineConfig.from_flat(engine_stuck_timeout=5).engine_stuck_timeout == 5
    for seconds in (0, 0.5):  # half a second of silence is an idle engine's
        with pytest.raises(UsageError, match="engine_stuck_timeout"):
            EngineConfig.from_flat(engine_stuck_timeout=seconds)


def test_facts_that_changed_reach_the_front_end_before_the_answer() -> None:
    async def scenario() -> None:
        async with pair() as (client, side):
            await started(client, side)
            client._front.refresh = lambda info: setattr(client._front, "info", info)  # type: ignore[method-assign]
            call = asyncio.create_task(client.call("set_policy", name="priority"))
            message = await side.receive()
            assert isinstance(message, Call) and (message.method, message.arguments) == (
                "set_policy",
                {"name": "priority"},
            )
            await side.send(Ready(msgspec.structs.replace(INFO, uses_priority=True)))
            await side.send(Reply(message.call_id, {"policy": "priority"}))
            assert await asyncio.wait_for(call, 3) == {"policy": "priority"}
            assert client.info.uses_priority
            refused = asyncio.create_task(client.call("set_policy", name="x"))
            message = await side.receive()
            assert isinstance(message, Call)
            await side.send(Reply(message.call_id, error="unknown policy 'x'"))
            with pytest.raises(HotswapError, match="unknown policy 'x'"):
                await asyncio.wait_for(refused, 3)

    run(scenario)
