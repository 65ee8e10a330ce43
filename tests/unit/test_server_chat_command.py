"""`hotswap chat`: what it prints, what it remembers, what it refuses."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from hotswap.core.config import EngineConfig
from hotswap.core.errors import HotswapError, UsageError
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.server.cli import chat
from hotswap.server.cli.chat_backends import RemoteBackend, _delta_of


class Parrot:
    """Answers with the number of messages it was given and the last one."""

    name = "parrot"

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.closed = False

    async def open(self) -> None:
        """Nothing to open."""

    async def answer(self, messages: list[dict[str, Any]], settings: dict[str, Any]) -> AsyncGenerator[str, None]:
        self.asked.append([dict(message) for message in messages])
        if messages[-1]["content"] == "fail":
            raise HotswapError("the parrot is [asleep]")
        yield f"{len(messages)}:"
        yield str(messages[-1]["content"])

    async def close(self) -> None:
        self.closed = True


def talk(lines: list[str], monkeypatch: pytest.MonkeyPatch, system: str | None = None) -> Parrot:
    remaining = iter(lines)

    def ask(*_: Any, **__: Any) -> str:
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("rich.console.Console.input", ask)
    parrot = Parrot()
    assert asyncio.run(chat._Conversation(parrot, {}, system).run(None)) == 0
    assert parrot.closed
    return parrot


def test_conversation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parrot = talk(["hello", "", "fail", "again", "/new", "/system be brief", "third", "/quit", "never"], monkeypatch)
    assert [[m["content"] for m in asked] for asked in parrot.asked] == [
        ["hello"],
        ["hello", "1:hello", "fail"],
        ["hello", "1:hello", "again"],
        ["be brief", "third"],
    ]
    assert parrot.asked[-1][0]["role"] == "system"
    shown = capsys.readouterr().out
    assert "1:hello" in shown and "3:again" in shown and "the parrot is [asleep]" in shown


def test_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(chat._Conversation(Parrot(), {}, "sys").run("hi")) == 0
    assert capsys.readouterr().out == "2:hi\n"


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert chat.printable("a\x1b[31mb\x07\nc\td\x9be 😀é") == "a[31mb\nc\tde 😀é"


def test_events() -> None:
    assert _delta_of('data: {"choices":[{"delta":{"content":"x"}}]}') == "x"
    assert (
        _delta_of('data: {"choices":[{"delta":{}}]}')
        == _delta_of('data: {"choices":[]}')
        == _delta_of("data: [DONE]")
        == ""
    )
    assert _delta_of("") == _delta_of(": ping") == ""
    with pytest.raises(HotswapError, match="why"):
        _delta_of('data: {"error":{"message":"why"}}')


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    chat.configure(parser)
    return parser.parse_args(words)


def test_engine_flags_do_not_go_with_a_url() -> None:
    with pytest.raises(UsageError, match="--max-num-seqs"):
        chat.run(parse("--url", "localhost:1", "--max-num-seqs", "3"))


def test_nobody_there() -> None:
    async def run() -> None:
        backend = RemoteBackend("127.0.0.1:9", None, None)
        try:
            await backend.open()
        finally:
            await backend.close()

    with pytest.raises(HotswapError, match="no server answers"):
        asyncio.run(run())


def test_an_engine_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything of `hotswap chat MODEL` but the engine itself."""
    engine = FakeEngine()

    def start_engine(config: EngineConfig, make_manager: Callable[[], PluginManager], report: Any) -> FakeEngine:
        assert make_manager().providers("policy")
        return engine

    monkeypatch.setattr("hotswap.core.engine.start.start_engine", start_engine)
    assert chat.run(parse("tiny", "--once", "hello", "--max-tokens", "5")) == 0
    assert len(capsys.readouterr().out.strip()) == 5
    assert engine.state == "dead" and not engine.aborted


@pytest.mark.parametrize("url", ["http://[::1", "127.0.0.1:9"])
def test_addresses_that_cannot_be_used(url: str) -> None:
    with pytest.raises(HotswapError, match="no server answers"):
        chat.run(parse("--url", url, "--once", "x"))
