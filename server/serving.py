"""The life of a server: HTTP first, then the engine, until a signal or a start-up error ends it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from .app import create_app
from .engine_surface import ServedEngine
from .http_server import HttpServer
from .starting import BackgroundStart, StartableEngine
from .state import ServerState

log = logging.getLogger("hotswap.server")
STATS_SECONDS = 10.0


def serve(
    state: ServerState, listener: socket.socket, start: BackgroundStart, on_ready: Callable[[StartableEngine], None]
) -> int:
    """Serves until told to stop. 0 after an orderly end, 1 when the engine had died.

    Until the engine is ready every request, /health included, gets 503. Raises HotswapError when the engine cannot
    start.
    """
    return asyncio.run(_serve(state, listener, start, on_ready))


async def _serve(
    state: ServerState, listener: socket.socket, start: BackgroundStart, on_ready: Callable[[StartableEngine], None]
) -> int:
    try:
        server = HttpServer(create_app(state), state)
    except BaseException:
        start.abandon()
        raise
    http = asyncio.create_task(server.serve([listener]), name="http")
    engine = asyncio.create_task(_start_engine(state, start), name="engine-start")
    await asyncio.wait({http, engine}, return_when=asyncio.FIRST_COMPLETED)
    if not engine.done():
        engine.cancel()
        start.abandon()
        await http
        return 0
    if (error := engine.exception()) is not None:
        start.abandon()
        server.should_exit = True
        await http
        raise error
    client = engine.result()
    on_ready(client)
    stats = (
        asyncio.create_task(_log_stats(state, client), name="stats")
        if not state.engine_config.disable_log_stats
        else None
    )
    try:
        await http
    finally:
        if stats is not None:
            stats.cancel()
        died = client.state == "dead"
        await client.shutdown()
    return 1 if died else 0


async def _start_engine(state: ServerState, start: BackgroundStart) -> StartableEngine:
    client = await start.engine()
    state.engine = client
    await client.start()
    return client


async def _log_stats(state: ServerState, client: ServedEngine) -> None:
    """A line every ten seconds while there is work."""
    last_tokens, last_time = 0, time.monotonic()
    while True:
        await asyncio.sleep(STATS_SECONDS)
        stats, now = client.stats, time.monotonic()
        tokens = stats.num_scheduled_tokens - last_tokens
        if tokens or state.num_calls:
            log.info(
                "%d running, %d waiting, %.1f tokens/s computed, KV cache %.1f %% used, prefix hits %.1f %%, "
                "%d preemptions",
                stats.num_running,
                stats.num_waiting,
                tokens / (now - last_time),
                100 * stats.kv_usage,
                100 * stats.prefix_hits / max(1, stats.prefix_queries),
                stats.num_preemptions_recompute + stats.num_preemptions_swap,
            )
        last_tokens, last_time = stats.num_scheduled_tokens, now
