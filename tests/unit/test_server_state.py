"""Calls in flight: ended by a client that leaves, by a server that stops, and by nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.core.errors import EngineDeadError, RequestError
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.server.limits import ClientGone
from hotswap.server.state import InFlight, ServerState


def make_state() -> ServerState:
    return ServerState(ServerConfig(), EngineConfig(), FakeEngine())


async def forever() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def leave() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def test_client_leaves() -> None:
    async def run() -> None:
        state = make_state()
        with pytest.raises(ClientGone):
            async with InFlight(state, leave):
                await asyncio.sleep(10)
        assert state.num_calls == 0
        await asyncio.sleep(0)  # nothing of the cancellation is left

    asyncio.run(run())


def test_work_that_ends_as_the_client_leaves() -> None:
    """The cancellation was asked for but not delivered: it must not hit what comes next."""

    async def run() -> None:
        state = make_state()
        for error in (None, ValueError("x"), EngineDeadError("x")):
            expected = ClientGone if error is None else type(error)
            with pytest.raises(expected):
                async with InFlight(state, forever) as call:
                    call.interrupt(ClientGone())
                    if error is not None:
                        raise error
            await asyncio.sleep(0.001)

    asyncio.run(run())


def test_interrupt_and_wait_idle() -> None:
    async def run() -> None:
        state = make_state()
        raised: list[BaseException] = []

        async def work() -> None:
            try:
                async with InFlight(state, forever):
                    await asyncio.sleep(10)
            except RequestError as error:
                raised.append(error)

        tasks = [asyncio.create_task(work()) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert state.num_calls == 3
        assert not await state.wait_idle(0.01)
        state.begin_drain()
        assert state.phase == "draining"
        state.interrupt_calls()
        await asyncio.gather(*tasks)
        assert await state.wait_idle(0.01)
        assert [getattr(error, "status", None) for error in raised] == [503] * 3

    asyncio.run(run())


def test_a_foreign_cancellation_stays_one() -> None:
    async def run() -> None:
        state = make_state()

        async def work() -> None:
            async with InFlight(state, forever):
                await asyncio.sleep(10)

        task = asyncio.create_task(work())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert state.num_calls == 0

    asyncio.run(run())


def test_phases() -> None:
    state = make_state()
    engine = state.engine
    assert isinstance(engine, FakeEngine)
    seen = [state.phase]
    engine.state = "starting"
    seen.append(state.phase)
    engine.state = "ready"
    state.begin_drain()
    seen.append(state.phase)
    engine.die("why")
    seen.append(state.phase)
    assert seen == ["ready", "starting", "draining", "dead"]
    with pytest.raises(EngineDeadError, match="why"):
        state.ready_engine()


def test_stuck_engine_is_not_healthy() -> None:
    state = make_state()
    engine = state.engine
    assert isinstance(engine, FakeEngine)
    engine.health = lambda: "the engine is stuck"  # type: ignore[method-assign]
    assert state.phase == "dead"
    with pytest.raises(EngineDeadError, match="stuck"):
        state.ready_engine()


@pytest.mark.parametrize(
    ("names", "said"),
    [(["a", "org/b"], "there is 'a', 'org/b'"), (["/srv/models/m"], "the list of models (v1/models) has the name")],
)
def test_another_model_is_told_the_names_that_an_error_may_say(names: list[str], said: str) -> None:
    engine_config = EngineConfig()
    engine_config.model.served_model_name[:] = names
    state = ServerState(ServerConfig(), engine_config, FakeEngine())
    assert [state.check_model(name) for name in names] == names
    with pytest.raises(RequestError) as refused:
        state.check_model("other")
    assert said in refused.value.message and "/srv" not in refused.value.message
