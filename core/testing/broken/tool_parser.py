"""Tool parsers with one fault each. Their format: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from ...contracts.tool_parser import (
    ToolCallDelta,
    ToolCallStream,
    ToolParser,
    ToolParserOutput,
    ToolParserProvider,
)
from . import BrokenSample

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"


class Whole(ToolParser):
    """Sound, and slow to answer: looks at the text only when it is complete. The samples differ from it in one thing."""

    def stream(self, tool_names: frozenset[str]) -> ToolCallStream:
        return WholeStream(self, tool_names)

    def load(self, text: str) -> Any:
        """What is between the marks, as an object."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None

    def known(self, name: object, tool_names: frozenset[str]) -> bool:
        return isinstance(name, str) and name in tool_names

    def delta(self, index: int, name: str, arguments: dict[str, Any]) -> list[ToolCallDelta]:
        return [ToolCallDelta(index, name, json.dumps(arguments))]

    def split(self, text: str, tool_names: frozenset[str]) -> ToolParserOutput:
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        position = number = 0
        while (start := text.find(OPENING, position)) >= 0 and (end := text.find(CLOSING, start)) >= 0:
            content.append(text[position:start])
            found = self.load(text[start + len(OPENING) : end])
            position = end + len(CLOSING)
            if (
                isinstance(found, dict)
                and self.known(found.get("name"), tool_names)
                and isinstance(found.get("arguments", {}), dict)
            ):
                calls += self.delta(number, found["name"], found.get("arguments", {}))
                number += 1
            else:
                content.append(text[start:position])
        return ToolParserOutput("".join([*content, text[position:]]), calls)


class WholeStream(ToolCallStream):
    def __init__(self, parser: Whole, tool_names: frozenset[str]) -> None:
        self.parser = parser
        self.tool_names = tool_names
        self.pieces: list[str] = []

    def feed(self, text: str) -> ToolParserOutput:
        self.pieces.append(text)
        return ToolParserOutput()

    def finish(self) -> ToolParserOutput:
        return self.parser.split("".join(self.pieces), self.tool_names)


class OneForAll(Whole):
    """Every choice gets the same stream."""

    def __init__(self) -> None:
        self._stream: WholeStream | None = None

    def stream(self, tool_names: frozenset[str]) -> ToolCallStream:
        if self._stream is None or self._stream.tool_names != tool_names:
            self._stream = _Emptied(self, tool_names)
        return self._stream


class _Emptied(WholeStream):
    def finish(self) -> ToolParserOutput:
        output = super().finish()
        self.pieces.clear()
        return output


class LosesMarks(Whole):
    """Sees a mark only when it comes in one piece; what looks like the rest of one is dropped."""

    def stream(self, tool_names: frozenset[str]) -> ToolCallStream:
        return _ByPiece(self, tool_names)


class _ByPiece(WholeStream):
    def feed(self, text: str) -> ToolParserOutput:
        return super().feed("" if text in ("<", "_", ">") else text)


class Rescans(Whole):
    """Searches everything that it has so far for each piece."""

    def stream(self, tool_names: frozenset[str]) -> ToolCallStream:
        return _Rescanning(self, tool_names)


class _Rescanning(WholeStream):
    def feed(self, text: str) -> ToolParserOutput:
        super().feed(text)
        re.search(r"<tool_call>\s*\{.*\}", "".join(self.pieces))
        return ToolParserOutput()


class Evaluates(Whole):
    """Takes what is no JSON for Python."""

    def load(self, text: str) -> Any:
        found = super().load(text)
        if found is not None:
            return found
        try:
            return eval(text.strip())  # noqa: S307 - the fault that this sample is for
        except Exception:  # noqa: BLE001 - only evaluating is wrong with it
            return None


class Raises(Whole):
    """Expects JSON between the marks."""

    def load(self, text: str) -> Any:
        return json.loads(text)


class NamesTwice(Whole):
    """Sends the name again with the arguments."""

    def delta(self, index: int, name: str, arguments: dict[str, Any]) -> list[ToolCallDelta]:
        return [ToolCallDelta(index, name), ToolCallDelta(index, name, json.dumps(arguments))]


class CallsAnything(Whole):
    """Takes a name that is not among the tools."""

    def known(self, name: object, tool_names: frozenset[str]) -> bool:
        return isinstance(name, str)


class ForgetsEmpty(Whole):
    """Sends nothing as the arguments of a call without any."""

    def delta(self, index: int, name: str, arguments: dict[str, Any]) -> list[ToolCallDelta]:
        return [ToolCallDelta(index, name, json.dumps(arguments) if arguments else "")]


class DropsTheUnfinished(Whole):
    """Forgets a call that was cut short."""

    def split(self, text: str, tool_names: frozenset[str]) -> ToolParserOutput:
        head, mark, tail = text.rpartition(OPENING)
        return super().split(head if mark and CLOSING not in tail else text, tool_names)


class Strips(Whole):
    """Tidies the user's text."""

    def split(self, text: str, tool_names: frozenset[str]) -> ToolParserOutput:
        output = super().split(text, tool_names)
        output.content = output.content.strip()
        return output


def _sample(
    name: str,
    make: Callable[[], ToolParser],
    caught_by: str,
    detect: Callable[[str], bool] = lambda text: OPENING in text,
) -> BrokenSample:
    provider = ToolParserProvider(
        name=name, build=lambda context: make(), detect=detect, summary=f"broken: {name.replace('_', ' ')}"
    )
    return BrokenSample(name, provider, caught_by)


BROKEN: Final[tuple[BrokenSample, ...]] = (
    _sample("one_for_all", OneForAll, "streams_share_nothing"),
    _sample("loses_marks", LosesMarks, "streamed_and_whole_are_equal"),
    _sample("rescans", Rescans, "work_is_linear_in_the_text"),
    _sample("evaluates", Evaluates, "nothing_is_evaluated"),
    _sample("raises", Raises, "nothing_that_a_model_writes_raises"),
    _sample("names_twice", NamesTwice, "streamed_and_whole_are_equal"),
    _sample("calls_anything", CallsAnything, "other_tools_are_content"),
    _sample("forgets_empty", ForgetsEmpty, "arguments_join_to_an_object"),
    _sample("drops_the_unfinished", DropsTheUnfinished, "a_call_cut_short_is_not_lost"),
    _sample("strips", Strips, "plain_text_is_content"),
    _sample("wants_every_template", Whole, "detect_reads_the_text_only", detect=lambda text: True),
)
