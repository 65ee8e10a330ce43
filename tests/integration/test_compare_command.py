"""`hotswap compare` with two running servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.testing.fake_engine import FakeEngine
from hotswap.server.cli.main import main

Compare = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Compare:
    """compare(url, url, flags...) -> (exit status, the JSON object)"""

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        status = main(["compare", *words, "--json"])
        out = capsys.readouterr().out
        return status, json.loads(out) if out else {}

    return run


def script(prompt: list[int], choice: int) -> list[int]:
    return [80 + n % 10 for n in range(200)]


def other_script(prompt: list[int], choice: int) -> list[int]:
    """The fifth token differs."""
    return [*script(prompt, choice)[:4], 99, *script(prompt, choice)[5:]]


def test_the_same_server_twice_is_equal(live: Callable[..., Any], compare: Compare) -> None:
    one, two = live(FakeEngine(script)), live(FakeEngine(script))
    status, found = compare(one.url, two.url, "--max-tokens", "8")
    assert status == 0 and not found["different"] and found["notes"] == []
    assert {row["endpoint"] for row in found["prompts"]} == {"completions", "chat"} and len(found["prompts"]) == 9
    assert all(row["same_text"] and row["logprob_max"] == 0.0 for row in found["prompts"])
    assert all(row["prompt_tokens"][0] == row["prompt_tokens"][1] > 0 for row in found["prompts"])
    known = {row["name"]: row["one"] for row in found["defaults"]}
    assert known["max_model_len"] == 256 and known["temperature"] == 1.0 and known["sampling"] == "always the same"
    assert known["max_tokens of a completion"] == 16 and known["adds BOS"] is False
    assert known["prompt tokens of a chat with 'Hello!'"] > 0
    assert found["ttft"]["count"] == found["total"]["count"] == 9


def test_texts_that_part(live: Callable[..., Any], compare: Compare, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = live(FakeEngine(script)), live(FakeEngine(other_script))
    status, found = compare(one.url, two.url, "--max-tokens", "8", "--no-defaults", "--endpoint", "completions")
    assert status == 1 and found["different"] and found["defaults"] == []
    for row in found["prompts"]:
        assert (row["token"], row["char"]) == (4, 4) and row["parting_logprobs"] == [-0.5, -0.5]
        assert row["logprob_max"] == 0.0, "of the four tokens before"
    assert main(["compare", one.url, two.url, "--no-defaults", "--endpoint", "completions"]) == 1
    out = capsys.readouterr().out
    assert "parts at character 4, token 4 (logprobs there" in out and "different: 6 of 6 prompts" in out


def test_defaults_that_differ(live: Callable[..., Any], compare: Compare) -> None:
    one = live(FakeEngine(script, generation_defaults={"temperature": 0.6, "max_tokens": 40}))
    two = live(FakeEngine(script, add_bos=True, max_model_len=128))
    status, found = compare(one.url, two.url, "--max-tokens", "4", "--endpoint", "completions")
    assert status == 1
    rows = {row["name"]: (row["one"], row["other"], row["same"]) for row in found["defaults"]}
    assert rows["temperature"] == (0.6, 1.0, False) and rows["max_model_len"] == (256, 128, False)
    assert rows["max_tokens of a completion"] == (40, 16, False) and rows["top_p"] == (1.0, 1.0, True)
    assert rows["adds BOS"] == (False, True, False) and rows["max_tokens"] == (40, None, None)
    assert all(row["same_text"] and row["different"] for row in found["prompts"]), "BOS is one more prompt token"


def test_a_server_without_chat_and_one_without_defaults(live: Callable[..., Any], compare: Compare) -> None:
    one, two = live(FakeEngine(script)), live(FakeEngine(script, chat_template=None))
    status, found = compare(one.url, two.url, "--max-tokens", "4", "--no-defaults")
    assert status == 0 and {row["endpoint"] for row in found["prompts"]} == {"completions"}
    assert len(found["notes"]) == 1 and "chat is not compared" in found["notes"][0]


def test_prompts_of_a_file(live: Callable[..., Any], compare: Compare, tmp_path: Path) -> None:
    server = live(FakeEngine())
    path = tmp_path / "p.jsonl"
    path.write_text('"abc"\n\n{"prompt": "def"}\n{"chat": "ghi"}\n')
    flags = ("--prompts", str(path), "--no-defaults")
    status, found = compare(server.url, server.url, *flags)
    assert status == 0
    assert [(row["prompt"], row["endpoint"]) for row in found["prompts"]] == [
        ("abc", "completions"), ("def", "completions"), ("ghi", "chat"),
    ]  # fmt: skip
    assert len(compare(server.url, server.url, *flags, "--endpoint", "chat")[1]["prompts"]) == 1


def test_failures_on_one_side_are_a_difference(live: Callable[..., Any], compare: Compare) -> None:
    one, two = live(FakeEngine(script)), live(FakeEngine(script))
    two.engine.fail_after = 2
    status, found = compare(one.url, two.url, "--max-tokens", "8", "--no-defaults", "--endpoint", "completions")
    assert status == 1 and all(
        row["errors"][0] is None and "error event" in row["errors"][1] for row in found["prompts"]
    )


def test_keys_and_names(live: Callable[..., Any], compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    from pydantic import SecretStr

    monkeypatch.delenv("HOTSWAP_API_KEY", raising=False)
    one, two = live(FakeEngine(script), api_key=[SecretStr("a")]), live(FakeEngine(script), api_key=[SecretStr("b")])
    flags = ("--no-defaults", "--endpoint", "completions", "--model", "tiny")
    assert compare(one.url, two.url, *flags, "--api-key", "a", "--api-key", "b")[0] == 0
    assert compare(one.url, two.url, *flags, "--api-key", "a")[0] == 1, "the second one refuses"


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ([], 2, "two addresses"),
        (["a"], 2, "two addresses"),
        (["a", "b", "c"], 2, "two addresses"),
        (["a", "b", "--max-tokens", "0"], 2, "--max-tokens"),
        (["a", "b", "--api-key", "1", "--api-key", "2", "--api-key", "3"], 2, "--api-key"),
        (["a", "b", "--prompts", "/no/such/file"], 2, "/no/such/file"),
        (["ftp://a", "b"], 2, "--url"),
        (["127.0.0.1:9", "127.0.0.1:9"], 1, "no server answers"),
    ],
)
def test_what_cannot_be_compared(words: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *words]) == status
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("line", ["{", "5", '{"prompt": 5}', "{}", '""'])
def test_prompt_lines_that_are_none(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    assert main(["compare", "a", "b", "--prompts", str(path)]) == 2
    assert "line 2" in capsys.readouterr().err
