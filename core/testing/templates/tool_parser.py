"""Tool parser `my_tool_parser`: a line `CALL name {"argument": 1}` is a call, every other line is for the user."""

from __future__ import annotations

import json
from collections.abc import Iterator

from hotswap.core.contracts import (
    ToolCallDelta,
    ToolCallStream,
    ToolParser,
    ToolParserOutput,
    ToolParserProvider,
    hookimpl,
)

MARK = "CALL "


class MyToolParser(ToolParser):
    def stream(self, tool_names: frozenset[str]) -> ToolCallStream:
        return _Lines(tool_names)


class _Lines(ToolCallStream):
    """Holds a line back while it may be a call."""

    def __init__(self, tool_names: frozenset[str]) -> None:
        self._tool_names = tool_names
        self._num_calls = 0
        self._start = ""  # the line's first characters, as many as the mark has
        self._held: list[str] = []  # the line, while it may be a call
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []

    def feed(self, text: str) -> ToolParserOutput:
        first, *others = text.split("\n")
        self._add(first)
        for piece in others:
            self._end_line("\n")
            self._add(piece)
        return self._take()

    def finish(self) -> ToolParserOutput:
        self._end_line("")
        return self._take()

    def _add(self, piece: str) -> None:
        self._held.append(piece)
        self._start += piece[: len(MARK) - len(self._start)]
        if not MARK.startswith(self._start):
            self._content += self._held
            self._held = []

    def _end_line(self, newline: str) -> None:
        line, self._held, self._start = "".join(self._held), [], ""
        name, _, arguments = line.removeprefix(MARK).partition(" ")
        if line.startswith(MARK) and name in self._tool_names and _is_object(arguments):
            self._calls.append(ToolCallDelta(self._num_calls, name, arguments))
            self._num_calls += 1
        else:
            self._content.append(line + newline)

    def _take(self) -> ToolParserOutput:
        output = ToolParserOutput("".join(self._content), self._calls)
        self._content, self._calls = [], []
        return output


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):  # what a model writes is data: it may be anything
        return False


@hookimpl
def hotswap_tool_parser() -> Iterator[ToolParserProvider]:
    yield ToolParserProvider(
        name="my_tool_parser",
        build=lambda context: MyToolParser(),
        detect=lambda chat_template: MARK in chat_template,
        summary="calls as lines that begin with CALL",
    )
