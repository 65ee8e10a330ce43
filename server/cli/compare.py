"""`hotswap compare URL_A URL_B`: do two servers answer alike, how fast is each, and what do they do by default?"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hotswap.core.errors import HotswapError, UsageError

if TYPE_CHECKING:
    from ..bench.http_client import Server, ServerFacts
    from ..bench.side_by_side import DefaultRow, Latency, PromptDifference

PROMPTS: Final = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
    "Der Himmel ist blau, weil",
    "The three primary colours are red,",
)
CHAT_PROMPTS: Final = ("What is the capital of France?", "Write a short poem about rain.", "What is 17 + 25?")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("urls", nargs="*", metavar="URL", help="the two servers, with or without /v1; ratios are second to first")
    add("--api-key", action="append", metavar="KEY", help="one for both, or given twice; else HOTSWAP_API_KEY")
    add("--model", action="append", metavar="NAME", help="one for both, or given twice; else each server's first one")
    add("--prompts", metavar="FILE", help='JSON lines: texts, {"prompt": TEXT} or {"chat": TEXT}')
    add("--endpoint", choices=("completions", "chat", "both"), default="both", help="(default: both)")
    add("--max-tokens", type=int, default=48, metavar="N", help="of each answer (default: 48)")
    add(
        "--logprob-tolerance",
        type=float,
        default=0.1,
        metavar="X",
        help="differences up to it are equal (default: 0.1)",
    )
    add("--no-defaults", action="store_true", help="do not ask about defaults")
    add("--json", action="store_true", help="print an object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """0 when the servers answer alike, 1 when they differ. Raises UsageError (2), and HotswapError when a server is not
    there."""
    if len(arguments.urls) != 2:
        raise UsageError(f"two addresses are compared, got {len(arguments.urls)}")
    if arguments.max_tokens < 1 or not arguments.logprob_tolerance >= 0:
        raise UsageError("--max-tokens starts at 1, --logprob-tolerance at 0")
    keys = _pair("--api-key", arguments.api_key, os.environ.get("HOTSWAP_API_KEY"))
    models = _pair("--model", arguments.model, None)
    questions = read_questions(arguments)
    result = asyncio.run(_compare(arguments, keys, models, questions))
    if arguments.json:
        print(json.dumps(result.as_dict(), indent=1))
    else:
        _print(result)
    return 1 if result.different else 0


def _pair(flag: str, given: Sequence[str] | None, default: str | None) -> tuple[str | None, str | None]:
    if not given:
        return default, default
    if len(given) > 2:
        raise UsageError(f"{flag}: one for both servers, or one each")
    return given[0], given[-1]


def read_questions(arguments: argparse.Namespace) -> list[tuple[str, bool]]:
    """(text, whether it is a chat). Raises UsageError naming the line."""
    wanted = {"completions": (False,), "chat": (True,), "both": (False, True)}[arguments.endpoint]
    if arguments.prompts is None:
        return [
            (p, chat) for prompts, chat in ((PROMPTS, False), (CHAT_PROMPTS, True)) if chat in wanted for p in prompts
        ]
    path = Path(arguments.prompts)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    questions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UsageError(f"--prompts {path}, line {number}: not JSON ({error})") from None
        text = value.get("prompt", value.get("chat")) if isinstance(value, dict) else value
        if not isinstance(text, str) or not text:
            raise UsageError(
                f'--prompts {path}, line {number}: a text, {{"prompt": TEXT}} or {{"chat": TEXT}} is needed'
            )
        chat = isinstance(value, dict) and "chat" in value
        if chat in wanted:
            questions.append((text, chat))
    if not questions:
        raise UsageError(f"--prompts {path}: there is no prompt for --endpoint {arguments.endpoint} in it")
    return questions


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """prompts: with a verdict each. notes: what could not be asked."""

    servers: tuple[ServerFacts, ServerFacts]
    prompts: list[tuple[PromptDifference, bool]]
    defaults: list[DefaultRow]
    ttft: Latency | None
    total: Latency | None
    notes: list[str]
    tolerance: float

    @property
    def different(self) -> bool:
        return any(verdict for _, verdict in self.prompts) or any(row.same is False for row in self.defaults)

    def as_dict(self) -> dict[str, Any]:
        """For --json. Times in seconds."""
        return {
            "kind": "hotswap-compare",
            "different": self.different,
            "servers": [{"url": s.url, "model": s.model, "software": s.software} for s in self.servers],
            "logprob_tolerance": self.tolerance,
            "prompts": [{**dataclasses.asdict(row), "different": verdict} for row, verdict in self.prompts],
            "defaults": [dataclasses.asdict(row) for row in self.defaults],
            "ttft": dataclasses.asdict(self.ttft) if self.ttft else None,
            "total": dataclasses.asdict(self.total) if self.total else None,
            "notes": self.notes,
        }


async def _compare(
    arguments: argparse.Namespace,
    keys: tuple[str | None, str | None],
    models: tuple[str | None, str | None],
    questions: Sequence[tuple[str, bool]],
) -> Result:
    from ..bench.http_client import Server, ask_about
    from ..bench.probes import learn_defaults
    from ..bench.side_by_side import compare_answers, compare_defaults, compare_latency

    notes: list[str] = []
    async with Server(arguments.urls[0], keys[0]) as one, Server(arguments.urls[1], keys[1]) as other:
        sides: list[tuple[Server, ServerFacts]] = []
        for server, model in ((one, models[0]), (other, models[1])):
            facts = await ask_about(server, model=model, chat=False, want=(), want_ids=False, warm=False)
            sides.append((server, facts))
        endpoints = await _endpoints(sides, {chat for _, chat in questions}, notes)
        rows = []
        for text, chat in questions:
            if chat not in endpoints:
                continue
            answers = [await _ask(side, text, chat, arguments.max_tokens) for side in sides]
            row = compare_answers(text, "chat" if chat else "completions", *answers)
            rows.append((row, row.is_different(arguments.logprob_tolerance)))
        defaults = []
        if not arguments.no_defaults:
            learnt = [
                await learn_defaults(server, facts, completions=False in endpoints, chat=True in endpoints)
                for server, facts in sides
            ]
            defaults = compare_defaults(*learnt)
    return Result(
        (sides[0][1], sides[1][1]),
        rows,
        defaults,
        compare_latency([row.ttft for row, _ in rows]),
        compare_latency([row.total for row, _ in rows]),
        notes,
        arguments.logprob_tolerance,
    )


async def _ask(side: tuple[Server, ServerFacts], text: str, chat: bool, max_tokens: int) -> Any:
    from ..bench.probes import ask

    server, facts = side
    logprobs = facts.extras.get("chat_logprobs" if chat else "logprobs", False)
    return await ask(server, facts, text, chat=chat, max_tokens=max_tokens, logprobs=logprobs)


async def _endpoints(sides: Sequence[tuple[Server, ServerFacts]], wanted: set[bool], notes: list[str]) -> set[bool]:
    """The endpoints that both servers have; learns on the way what each takes. Raises HotswapError when there is none."""
    from ..bench.http_client import learn_extras

    both = set()
    refusals = []
    for chat in sorted(wanted):
        name = "chat" if chat else "completions"
        missing = []
        for server, facts in sides:
            try:
                want = ("include_usage", "chat_logprobs") if chat else ("include_usage", "ignore_eos", "logprobs")
                await learn_extras(server, facts, chat=chat, want=want)
            except HotswapError as error:
                missing.append(str(error))
        if missing:
            refusals += missing
            notes.append(f"{name} is not compared: {'; '.join(missing)}")
        else:
            both.add(chat)
    if not both:
        raise HotswapError(f"there is nothing that both servers answer: {'; '.join(refusals)}")
    return both


# Tables.


def _print(result: Result) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
    for letter, facts in zip("AB", result.servers, strict=True):
        console.print(f"{letter}  {facts.url}  {facts.model}  ({facts.software})", soft_wrap=True)
    console.print()
    _print_prompts(console, result)
    _print_latency(console, result)
    _print_defaults(console, result)
    for note in result.notes:
        console.print(f"- {note}", soft_wrap=True)
    count = sum(verdict for _, verdict in result.prompts)
    unlike = sum(row.same is False for row in result.defaults)
    if result.different:
        console.print(f"different: {count} of {len(result.prompts)} prompts, {unlike} defaults", style="bold red")
    else:
        console.print(f"equal: {len(result.prompts)} prompts, {len(result.defaults)} defaults", style="bold green")


def _print_prompts(console: Any, result: Result) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (
        "prompt",
        "endpoint",
        "text",
        "logprobs differ by",
        "prompt tokens",
        "TTFT ms A, B",
        "total ms A, B",
    ):
        table.add_column(column)
    for row, different in result.prompts:
        table.add_row(
            Text(repr(row.prompt[:32])),
            row.endpoint,
            Text(_verdict(row), style="red" if different else "green"),
            "-" if row.logprob_max is None else f"{row.logprob_mean:.4f} mean, {row.logprob_max:.4f} max",
            " / ".join("-" if count is None else str(count) for count in row.prompt_tokens),
            " / ".join("-" if t is None else f"{1e3 * t:.0f}" for t in row.ttft),
            " / ".join("-" if t is None else f"{1e3 * t:.0f}" for t in row.total),
        )
    console.print(table)
    for row, _ in result.prompts:
        for letter, error in zip("AB", row.errors, strict=True):
            if error is not None:
                console.print(f"  {row.prompt[:32]!r}: {letter}: {error}", soft_wrap=True)
        if row.char is not None:
            console.print(f"  {row.prompt[:32]!r} parts at {_position(row)}:", soft_wrap=True)
            for letter, text in zip("AB", row.context, strict=True):
                console.print(f"    {letter} {text!r}", soft_wrap=True)
    console.print()


def _verdict(row: PromptDifference) -> str:
    if any(row.errors):
        return "no answer"
    if row.same_text:
        return "same" if row.finish_reasons[0] == row.finish_reasons[1] else "same, other end"
    return f"parts at {row.char}"


def _position(row: PromptDifference) -> str:
    token = "" if row.token is None else f", token {row.token}"
    chances = ""
    if row.parting_logprobs is not None:
        chances = f" (logprobs there {row.parting_logprobs[0]:.3f} and {row.parting_logprobs[1]:.3f})"
    return f"character {row.char}{token}{chances}"


def _print_latency(console: Any, result: Result) -> None:
    for name, latency in (("TTFT", result.ttft), ("total", result.total)):
        if latency is not None:
            console.print(
                f"{name:<6} median of {latency.count} prompts, one at a time: A {1e3 * latency.one:.1f} ms, "
                f"B {1e3 * latency.other:.1f} ms, B/A {latency.ratio:.2f}"
            )
    console.print()


def _print_defaults(console: Any, result: Result) -> None:
    from rich.table import Table
    from rich.text import Text

    if not result.defaults:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("when a request says nothing", "A", "B", "", "known from"):
        table.add_column(column)
    styles = {True: ("same", "green"), False: ("different", "red"), None: ("not comparable", "dim")}
    for row in result.defaults:
        verdict, style = styles[row.same]
        known = " / ".join(dict.fromkeys(how for how in row.how if how))
        cells = ("-" if value is None else str(value) for value in (row.one, row.other))
        table.add_row(row.name, *cells, Text(verdict, style=style), known)
    console.print(table)
    console.print()
