"""`hotswap serve [MODEL]`: a model behind the OpenAI API.

The socket is bound first: a taken port is told within the second, and until the model is loaded /health answers 503.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from hotswap.core import logs
from hotswap.core.compatibility import refuse_incompatible
from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.core.errors import UsageError

from ..listening import bind, is_loopback, url_of
from .flags import add_flags
from .known_flags import add_known_flags
from .progress import ProgressLine
from .settings import add_config_flag, read_settings

if TYPE_CHECKING:
    from hotswap.core.plugin_manager import PluginManager

    from ..starting import StartableEngine
    from ..state import ServerState

API_KEY_VARIABLE = "HOTSWAP_API_KEY"
ADMIN_KEY_VARIABLE = "HOTSWAP_ADMIN_KEY"
log = logging.getLogger("hotswap.server")


def configure(parser: argparse.ArgumentParser) -> None:
    add_config_flag(parser)
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig)
    add_known_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Raises HotswapError (one line, exit status 1 or 2) when the server cannot start."""
    from ..starting import BackgroundStart

    begin = time.perf_counter()
    settings = read_settings(arguments, EngineConfig, ServerConfig)
    engine_config = settings.build(EngineConfig)
    config = with_key_from_environment(settings.build(ServerConfig))
    logs.configure(engine_config.log_level, engine_config.log_format)
    in_json = engine_config.log_format == "json"
    check_exposure(config, log.warning if in_json else _warn)
    refuse_incompatible(engine_config)  # before a port is taken and a process started
    listener = bind(config.host, config.port)
    progress = ProgressLine((lambda what: log.info("starting: %s", what)) if in_json else None)
    # The engine's start comes before the import of the HTTP side: the two then happen side by side.
    start = BackgroundStart(lambda: launch_engine(engine_config, settings.manager, progress))
    from ..serving import serve
    from ..state import ServerState

    state = ServerState(config, engine_config)

    def announce(engine: StartableEngine) -> None:
        progress.close()
        print(_ready_lines(url_of(listener), state, engine, time.perf_counter() - begin), flush=True)

    try:
        return serve(state, listener, start, announce)
    finally:
        progress.close()


def launch_engine(
    config: EngineConfig, make_manager: Callable[[], PluginManager], progress: ProgressLine
) -> StartableEngine:
    """Blocks until the engine process is on its way. Raises HotswapError."""
    from hotswap.core.engine.start import start_engine

    client = start_engine(config, make_manager, report=progress)
    client.on_progress = lambda message: progress(message.what, message.done, message.total)
    return client


def with_key_from_environment(config: ServerConfig) -> ServerConfig:
    """HOTSWAP_API_KEY is one more key, HOTSWAP_ADMIN_KEY the admin key unless a flag gives it: unlike a flag, a variable
    is not seen in the list of processes."""
    update: dict[str, Any] = {}
    if key := os.environ.get(API_KEY_VARIABLE):
        update["api_key"] = [*config.api_key, SecretStr(key)]
    if config.admin_key is None and (key := os.environ.get(ADMIN_KEY_VARIABLE)):
        update["admin_key"] = SecretStr(key)
    return config.model_copy(update=update) if update else config


def _warn(text: str) -> None:
    print(f"hotswap: WARNING: {text}", file=sys.stderr, flush=True)


def check_exposure(config: ServerConfig, warn: Callable[[str], None] = _warn) -> None:
    """Raises UsageError under --strict-auth when anybody who reaches the port could use the server; otherwise says so,
    loudly."""
    if config.api_key or is_loopback(config.host):
        return
    danger = f"--host {config.host} without an API key: whoever reaches this port can use the server"
    remedy = f"set --api-key or {API_KEY_VARIABLE}, or listen on 127.0.0.1"
    if config.strict_auth:
        raise UsageError(f"{danger}; {remedy}")
    warn(f"{danger}; {remedy}")


def _ready_lines(url: str, state: ServerState, engine: StartableEngine, seconds: float) -> str:
    info = engine.info
    model = state.model_names[0]
    key = ' -H "Authorization: Bearer $KEY"' if state.config.api_key else ""
    if engine.chat_template is not None:
        path, body = "chat/completions", {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    else:
        path, body = "completions", {"model": model, "prompt": "Hello"}
    return (
        f"hotswap serves {model} on {url}/v1 ({info.device}, {info.dtype}, window {info.max_model_len} tokens, "
        f"ready in {seconds:.1f} s)\n"
        f"  curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )
