"""Kind `tool_parser`: finds tool calls in what a model writes. One is active for the model; API process, event loop.

What a model writes is data: a parser never evaluates it, is linear in its length, and never raises because of it. Streamed
and whole results are equal however the text is cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from .provider import BuildContext, Provider


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of one call. index: which call of this choice, from 0. name: in the call's first delta only.
    arguments: the next piece of its arguments, JSON text; the pieces of a call join to one JSON object."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ToolParserOutput:
    """What a piece of text added: text for the user, and pieces of calls, in order."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolCallStream(ABC):
    """One choice's text, piece by piece. Owned by that choice: nothing is shared between choices."""

    @abstractmethod
    def feed(self, text: str) -> ToolParserOutput:
        """The next piece of text. What may be the beginning of a call is held back."""

    @abstractmethod
    def finish(self) -> ToolParserOutput:
        """No more text comes. A call that was cut short is given as content, as it was written, unless its name was sent
        already; then its arguments simply end."""


class ToolParser(ABC):
    """One format. Immutable; makes a stream per choice."""

    @abstractmethod
    def stream(self, tool_names: frozenset[str]) -> ToolCallStream:
        """tool_names: the tools of this request. A call of any other is content."""

    def parse(self, text: str, tool_names: frozenset[str]) -> ToolParserOutput:
        """A whole text at once: by definition what a stream gives."""
        stream = self.stream(tool_names)
        total = ToolParserOutput()
        for output in (stream.feed(text), stream.finish()):
            total.content += output.content
            total.calls += output.calls
        return total


def _never(chat_template: str) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserProvider(Provider[ToolParser]):
    """detect: whether a model with this chat template writes its calls in this format; looks at the text only."""

    detect: Callable[[str], bool] = _never


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserContext(BuildContext):
    """A tool parser needs nothing beyond the common context."""
