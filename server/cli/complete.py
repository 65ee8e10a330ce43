"""`hotswap complete [MODEL] PROMPT`: continues a text with an engine of its own or, with --url, on a running server.

The text goes to standard output and nothing else does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.core.errors import HotswapError, UsageError

from .flags import add_flags
from .settings import Settings, add_config_flag, read_settings

if TYPE_CHECKING:
    import httpx

# `--seed` is the request's here, and MODEL shares its place with PROMPT.
_OWN_FLAGS = ("model", "seed")
_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "stop", "n", "logprobs")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [flags] [MODEL] PROMPT"
    parser.add_argument("words", nargs="*", metavar="PROMPT", help="what to continue, after MODEL if that is given")
    group = parser.add_argument_group("Completion")
    add = group.add_argument
    add("--file", metavar="FILE", help="Take the prompt from a file; - is standard input, as is no prompt at all.")
    add("--url", metavar="URL", help="Ask the server at this address instead of loading a model.")
    add("--api-key", metavar="KEY", help="Key for --url; HOTSWAP_API_KEY when not given.")
    add("--model", default=argparse.SUPPRESS, metavar="MODEL", help="The model, or its name on the server.")
    add("--max-tokens", type=int, default=128, metavar="N", help="Longest continuation in tokens (default: 128).")
    add("--temperature", type=float, metavar="T", help="The model's own when not given.")
    add("--top-p", type=float, metavar="P", help="The model's own when not given.")
    add("--seed", type=int, dest="seed", metavar="N", help="The same seed gives the same text.")
    add("--stop", action="append", metavar="TEXT", help="End before this text; may be repeated.")
    add("-n", type=int, metavar="N", help="So many continuations; each ends with a newline.")
    add("--logprobs", type=int, metavar="N", help="One token a line: its log-probability, and N alternatives.")
    add("--echo", action="store_true", help="Print the prompt as well, as the server has it.")
    add("--json", action="store_true", help="Print the API's answer.")
    add_config_flag(parser)
    add_flags(parser, EngineConfig, only=lambda name: name not in _OWN_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """0 after a completion. Raises HotswapError; UsageError for what cannot be asked."""
    prompt = read_prompt(arguments)
    body = request_body(arguments, prompt)
    engine_arguments = argparse.Namespace(**{k: v for k, v in vars(arguments).items() if k != "seed"})
    settings = read_settings(engine_arguments, EngineConfig)
    if arguments.url:
        given = settings.command_line.keys() - {"model"}
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in sorted(given))
            raise UsageError(f"{flags}: with --url the model is the server's; its settings are given there")
    return asyncio.run(_complete(arguments, settings, body))


def read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt, from wherever it comes; sets `arguments.model` when MODEL was given. Raises UsageError."""
    words = list(arguments.words)
    if len(words) > 2 or (arguments.file is not None and len(words) > 1):
        raise UsageError(f"{len(words)} arguments: at most MODEL and PROMPT are taken; put quotes around the prompt")
    source: str | None = arguments.file
    prompt: str | None = None
    if source is None and words:
        prompt = words.pop()
        source = "-" if prompt == "-" else None
    elif source is None:
        source = "-"
    if words:
        if vars(arguments).get("model", words[0]) != words[0]:
            raise UsageError(f"two models: {words[0]} and --model {arguments.model}; keep one")
        arguments.model = words[0]
    if source == "-":
        if sys.stdin.isatty():
            raise UsageError("a prompt is needed: as an argument, with --file, or on standard input")
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError:
            raise UsageError("standard input: not UTF-8") from None
    elif source is not None:
        try:
            prompt = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--file {source}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    if not prompt:
        raise UsageError("the prompt is empty")
    return prompt


def request_body(arguments: argparse.Namespace, prompt: str) -> dict[str, Any]:
    """What is asked of /v1/completions; the server checks the values."""
    body: dict[str, Any] = {"prompt": prompt}
    for name in _SAMPLING:
        value = getattr(arguments, name)
        if value is not None:
            body[name] = value
    if arguments.echo:
        body["echo"] = True
    return body


async def _complete(arguments: argparse.Namespace, settings: Settings, body: dict[str, Any]) -> int:
    async with _client(arguments, settings) as (client, model):
        if model is not None:
            body = {"model": model, **body}
        if arguments.json:
            await _print_answer(client, body)
        else:
            await _print_stream(client, body, by_token=arguments.logprobs is not None)
    return 0


@asynccontextmanager
async def _client(
    arguments: argparse.Namespace, settings: Settings
) -> AsyncIterator[tuple[httpx.AsyncClient, str | None]]:
    """A client whose root is a server's, and the model to name. Raises HotswapError."""
    import httpx

    if arguments.url:
        from ..bench.http_client import Server

        key = arguments.api_key or os.environ.get("HOTSWAP_API_KEY")
        async with Server(arguments.url, key) as server:
            model = settings.command_line.get("model")
            if model is None:
                cards = await server.models()
                model = str(cards[0].get("id")) if cards else None
            server.client.base_url = httpx.URL(server.base)
            yield server.client, model
        return
    from .local_engine import local_engine, quiet_config

    config = quiet_config(settings)
    async with local_engine(settings, config) as engine:
        from ..app import create_app
        from ..state import ServerState
        from .app_transport import AppTransport

        app = create_app(ServerState(ServerConfig(), config, engine))
        async with httpx.AsyncClient(
            transport=AppTransport(app), base_url="http://localhost", timeout=httpx.Timeout(None)
        ) as client:
            yield client, None


async def _print_answer(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    import httpx

    try:
        reply = await client.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise HotswapError(f"no answer from {client.base_url}: {type(error).__name__}") from None
    _check(reply.status_code, reply.content)
    try:
        answer = reply.json()
    except ValueError:
        raise HotswapError(f"{client.base_url} does not answer with JSON: is this an OpenAI server?") from None
    print(json.dumps(answer, indent=2, ensure_ascii=False))


def _check(status: int, content: bytes) -> None:
    from ..bench.http_client import refusal_text

    if status == 400 or status == 422:
        raise UsageError(f"the server refuses: {refusal_text(content)}")
    if not 200 <= status < 300:
        raise HotswapError(f"the server refuses ({status}): {refusal_text(content)}")


async def _print_stream(client: httpx.AsyncClient, body: dict[str, Any], *, by_token: bool) -> None:
    import httpx

    from ..bench.sse import EventParser

    output = _Output(body.get("n", 1), by_token=by_token)
    parser = EventParser()
    try:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
            if not reply.is_success:
                _check(reply.status_code, await reply.aread())
            async for piece in reply.aiter_bytes():
                for data in parser.feed(piece):
                    output.take(data)
            for data in parser.close():
                output.take(data)
    except httpx.HTTPError as error:
        raise HotswapError(f"the connection to {client.base_url} broke: {type(error).__name__}") from None
    finally:
        output.close()


class _Output:
    """Prints chunks: as they come for one continuation, at the end and in order for several."""

    def __init__(self, num_choices: int, *, by_token: bool) -> None:
        self._several = num_choices > 1
        self._by_token = by_token
        self._terminal = sys.stdout.isatty()
        self._held: dict[int, list[str]] = {}
        self._last = ""

    def take(self, data: str) -> None:
        """Raises HotswapError for an error event."""
        if data.strip() == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise HotswapError(f"the server sends what is not JSON: {data[:80]!r}") from None
        if event.get("error"):
            error = event["error"]
            message = error.get("message", "no reason given") if isinstance(error, dict) else error
            raise HotswapError(f"the server broke off: {message}")
        for choice in event.get("choices") or ():
            shown = self._shown(choice)
            if self._several:
                self._held.setdefault(choice.get("index", 0), []).append(shown)
            else:
                self._write(shown)

    def _shown(self, choice: dict[str, Any]) -> str:
        if self._by_token:
            return "".join(line + "\n" for line in token_lines(choice.get("logprobs"), colours=self._terminal))
        text = str(choice.get("text") or "")
        if self._terminal:
            from .chat import printable

            text = printable(text)
        return text

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._last = text[-1]

    def close(self) -> None:
        """What is still held; a newline after text that has none."""
        for _, pieces in sorted(self._held.items()):
            self._write("".join(pieces))
            self._end_line()
        self._held.clear()
        self._end_line()

    def _end_line(self) -> None:
        if self._last not in ("", "\n"):
            self._write("\n")


def token_lines(logprobs: dict[str, Any] | None, *, colours: bool) -> list[str]:
    """`-0.105   90.0 %  ' Paris'   ' the' -3.2` for each token of a chunk: natural logarithm, probability, token,
    alternatives."""
    import math

    if not logprobs:
        return []
    tops = logprobs.get("top_logprobs") or []
    lines = []
    for number, (token, value) in enumerate(
        zip(logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), strict=True)
    ):
        top = (tops[number] if number < len(tops) else None) or {}
        others = "  ".join(f"{other!r} {chance:.2f}" for other, chance in top.items() if other != token)
        if value is None:
            numbers, colour = f"{'-':>8}  {'-':>7}", "0"
        else:
            chance = math.exp(value)
            numbers = f"{value:8.3f}  {100 * chance:5.1f} %"
            colour = "32" if chance >= 0.9 else "33" if chance >= 0.5 else "31"
        shown = f"\x1b[{colour}m{token!r}\x1b[0m" if colours else repr(token)
        lines.append(f"{numbers}  {shown}" + (f"   {others}" if others else ""))
    return lines
