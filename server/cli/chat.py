"""`hotswap chat [MODEL]`: talk in the terminal with an engine of its own or, with --url, with a running server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
import unicodedata
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from hotswap.core.config import EngineConfig
from hotswap.core.errors import HotswapError, UsageError

from .chat_backends import LocalBackend, RemoteBackend
from .flags import add_flags
from .settings import add_config_flag, read_settings

HELP = "/new starts over, /system TEXT sets the instructions, /quit ends; Ctrl-C stops an answer, Ctrl-D ends."


class Backend(Protocol):
    """Who answers."""

    name: str

    async def open(self) -> None:
        """Raises HotswapError when there is nobody to talk to."""
        ...

    def answer(self, messages: list[dict[str, Any]], settings: dict[str, Any]) -> AsyncGenerator[str, None]:
        """Text deltas of the next turn. Closing it stops the answer. Raises HotswapError."""
        ...

    async def close(self) -> None: ...


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Conversation")
    group.add_argument("--url", metavar="URL", help="Chat with the server at this address instead of loading a model.")
    group.add_argument("--api-key", metavar="KEY", help="Key for --url; HOTSWAP_API_KEY when not given.")
    group.add_argument("--system", metavar="TEXT", help="Instructions that come before the conversation.")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="Sampling temperature; the model's own when not given."
    )
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="Longest answer in tokens; up to the window when not given."
    )
    group.add_argument("--once", metavar="TEXT", help="Ask this, print the answer and end.")
    add_config_flag(parser)
    add_flags(parser, EngineConfig)


def run(arguments: argparse.Namespace) -> int:
    """0 after a conversation. Raises HotswapError."""
    settings = read_settings(arguments, EngineConfig)
    backend: Backend
    if arguments.url:
        given = settings.command_line.keys() - {"model"}
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in sorted(given))
            raise UsageError(f"{flags}: with --url the model is the server's; its settings are given there")
        key = arguments.api_key or os.environ.get("HOTSWAP_API_KEY")
        backend = RemoteBackend(arguments.url, key, settings.command_line.get("model"))
    else:
        backend = LocalBackend(settings)
    sampling = {
        name: value
        for name, value in (("temperature", arguments.temperature), ("max_tokens", arguments.max_tokens))
        if value is not None
    }
    return asyncio.run(_Conversation(backend, sampling, arguments.system).run(arguments.once))


class _Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, backend: Backend, sampling: dict[str, Any], system: str | None) -> None:
        self._backend = backend
        self._sampling = sampling
        self._system = system
        self._messages: list[dict[str, Any]] = []

    async def run(self, once: str | None) -> int:
        try:
            await self._backend.open()
            if once is not None:
                await self._turn(once)
            else:
                await self._loop()
        finally:
            await self._backend.close()
        return 0

    async def _loop(self) -> None:
        from rich.console import Console

        console = Console(highlight=False)
        console.print(f"[bold]{self._backend.name}[/bold]  [dim]{HELP}[/dim]")
        while True:
            try:
                line = (await _in_daemon_thread(lambda: console.input("[bold cyan]> [/bold cyan]"))).strip()
            except EOFError:
                console.print()
                return
            if line in ("/quit", "/exit"):
                return
            if line == "/new":
                self._messages.clear()
            elif line.startswith("/system"):
                self._system = line.removeprefix("/system").strip() or None
            elif line.startswith("/"):
                console.print(f"[dim]{HELP}[/dim]")
            elif line:
                try:
                    await self._turn(line)
                except HotswapError as error:
                    console.print(str(error), style="red", markup=False)

    async def _turn(self, text: str) -> None:
        """One question and its answer. An answer that Ctrl-C stopped stays in the conversation as far as it came."""
        question = {"role": "user", "content": text}
        system = [{"role": "system", "content": self._system}] if self._system else []
        answer = ""
        task = asyncio.current_task()
        try:
            stream = self._backend.answer([*system, *self._messages, question], self._sampling)
            async with aclosing(stream):
                async for delta in stream:
                    answer += delta
                    sys.stdout.write(printable(delta))
                    sys.stdout.flush()
        except asyncio.CancelledError:  # asyncio.run turns the first Ctrl-C into a cancellation of this task
            if task is None or task.uncancel() > 0:
                raise
        finally:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._messages += [question, {"role": "assistant", "content": answer}]


async def _in_daemon_thread(ask: Callable[[], str]) -> str:
    """Runs `ask` beside the event loop, in a thread that does not keep the process alive when Ctrl-C ends the loop."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def settle(line: str | None) -> None:
        if answer.done():
            return
        if line is None:
            answer.set_exception(EOFError())
        else:
            answer.set_result(line)

    def work() -> None:
        try:
            line: str | None = ask()
        except (EOFError, OSError):  # the terminal is gone
            line = None
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, line)

    threading.Thread(target=work, name="chat-input", daemon=True).start()
    return await answer


def printable(text: str) -> str:
    """Without control characters: what a model writes must not drive the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
