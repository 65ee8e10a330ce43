"""`hotswap complete`: where the prompt comes from, what is printed where, exit statuses."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hotswap.core.config import EngineConfig
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.server.cli.app_transport import AppTransport
from hotswap.server.cli.complete import token_lines
from hotswap.server.cli.main import main


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """What the command starts instead of an engine process; answers with the prompt backwards."""
    fake = FakeEngine()

    def start_engine(config: EngineConfig, make_manager: Callable[[], PluginManager], report: Any) -> FakeEngine:
        assert make_manager().providers("policy")
        return fake

    monkeypatch.setattr("hotswap.core.engine.start.start_engine", start_engine)
    return fake


def test_text_and_nothing_else(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "tiny", "qwxz"]) == 0
    assert capsys.readouterr().out == "zxwq\n"
    assert engine.state == "dead" and not engine.aborted
    (request,) = engine.requests
    assert request.sampling.max_tokens == 128


def test_sampling_flags_reach_the_engine(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--temperature",
        "0.5",
        "--top-p",
        "0.9",
        "--seed",
        "7",
        "--max-tokens",
        "20",
        "--stop",
        "ss",
        "--stop",
        "x",
    ]
    assert main(["complete", *flags, "stressed"]) == 0
    assert capsys.readouterr().out == "de\n"
    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.stop) == (0.5, 0.9, 20, ["ss", "x"])
    assert sampling.seed == 7


def test_several_continuations(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "-n", "2", "--echo", "abc"]) == 0
    assert capsys.readouterr().out == "abccba\nabccba\n"


def test_json_is_the_answer(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "--json", "abc"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["object"] == "text_completion" and answer["choices"][0]["text"] == "cba"
    assert answer["usage"]["completion_tokens"] == 4


def test_logprobs_are_lines(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "--logprobs", "2", "--max-tokens", "2", "ab"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:4] == ["-0.500", "60.7", "%", "'b'"] and "'c' -1.00" in first
    assert "'a'" in second


def test_token_lines() -> None:
    logprobs = {
        "tokens": ["x", "\n"],
        "token_logprobs": [None, -0.01],
        "top_logprobs": [None, {"\n": -0.01, "y": -5.0}],
    }
    first, second = token_lines(logprobs, colours=False)
    assert first.split() == ["-", "-", "'x'"]
    assert "99.0 %" in second and "'\\n'" in second and second.endswith("'y' -5.00")
    assert "\x1b[32m" in token_lines(logprobs, colours=True)[1]
    assert token_lines(None, colours=True) == []


# Where the prompt comes from.


def test_prompt_from_a_file(engine: FakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("q.w")
    assert main(["complete", "--file", str(path), "tiny"]) == 0
    assert capsys.readouterr().out == "w.q\n"


@pytest.mark.parametrize("words", [[], ["-"], ["--file", "-"], ["tiny", "-"]])
def test_prompt_from_standard_input(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("qwxz"))
    assert main(["complete", *words]) == 0
    assert capsys.readouterr().out == "zxwq\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["a", "b", "c"], "quotes"),
        (["--file", "/no/such/file"], "/no/such/file"),
        ([""], "empty"),
        (["--model", "x", "y", "prompt"], "two models"),
        (["--url", "localhost:1", "--max-num-seqs", "3", "prompt"], "--max-num-seqs"),
        (["--url", "ftp://x", "prompt"], "--url"),
    ],
)
def test_what_cannot_be_asked(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", *words]) == 2
    captured = capsys.readouterr()
    assert text in captured.err and captured.out == ""


def test_a_terminal_is_asked_for_a_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["complete"]) == 2
    assert "a prompt is needed" in capsys.readouterr().err


# Failures.


def test_the_servers_refusal_is_a_usage_error(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "--temperature", "-1", "abc"]) == 2
    captured = capsys.readouterr()
    assert "temperature" in captured.err and captured.out == ""


def test_an_answer_that_breaks_off(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.fail_after = 2
    assert main(["complete", "abcdef"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "fe\n" and "the server broke off" in captured.err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "--url", "127.0.0.1:9", "abc"]) == 1
    assert "no server answers" in capsys.readouterr().err


# The application behind a client, without a socket.


def test_answers_come_in_pieces_and_a_client_that_leaves_is_noticed() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == "/p" and (await receive())["body"] == b"{}"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"b")]})
        for number in range(2):
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
        seen.append((await receive())["type"])

    async def run() -> None:
        async with httpx.AsyncClient(transport=AppTransport(app), base_url="http://localhost") as client:
            async with client.stream("POST", "/p", content=b"{}") as reply:
                assert reply.headers["x-a"] == "b"
                pieces = reply.aiter_raw()
                assert [await anext(pieces), await anext(pieces)] == [b"0", b"1"]
                assert seen == []
            assert seen == ["http.disconnect"]

    asyncio.run(run())


def test_an_application_that_fails_is_not_waited_for() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("broken")

    async def run() -> None:
        async with httpx.AsyncClient(transport=AppTransport(app), base_url="http://localhost") as client:
            with pytest.raises(ValueError, match="broken"):
                await client.get("/p")

    asyncio.run(run())
