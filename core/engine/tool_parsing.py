"""The tool parser of the model being served: chosen once in the API process, and kept from harming more than one request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

from ..clock import SystemClock
from ..config import EngineConfig
from ..contracts.provider import DeviceInfo
from ..contracts.tool_parser import (
    ToolCallDelta,
    ToolCallStream,
    ToolParser,
    ToolParserContext,
    ToolParserOutput,
    ToolParserProvider,
)
from ..errors import RequestError
from ..plugin_manager import PluginManager, Suits

T = TypeVar("T")
logger = logging.getLogger("hotswap.tools")


def choose_tool_parser(manager: PluginManager, config: EngineConfig, chat_template: str | None) -> ToolParser | None:
    """The parser that the operator named, else the one that recognises the template, else None. Raises PluginError.

    chat_template: its text; None for a model without one.
    """

    def recognises(provider: object) -> bool:
        return chat_template is not None and cast(ToolParserProvider, provider).detect(chat_template)

    context = ToolParserContext(
        options=None,
        config=config,
        device=DeviceInfo(kind="host", name="host"),
        clock=SystemClock(),
        role="api",
    )
    choice = manager.choose_or_none("tool_parser", context, suits=Suits("this chat template", recognises))
    if choice is None:
        return None
    logger.info("tool calls are read by %s (%s)", choice.described, choice.why)
    return GuardedToolParser(manager.build_choice(choice, context), choice.described)


class GuardedToolParser(ToolParser):
    """A plugin's parser, whose faults end the request that they happen in: RequestError, status 500. The log has the
    cause, with the plugin's name; the client does not."""

    def __init__(self, parser: ToolParser, described: str) -> None:
        """described: the plugin, for the log."""
        self._parser = parser
        self._described = described

    def stream(self, tool_names: frozenset[str]) -> ToolCallStream:
        stream = _guarded(self._described, lambda: self._parser.stream(tool_names), ToolCallStream)
        return _GuardedStream(stream, self._described, tool_names)


class _GuardedStream(ToolCallStream):
    def __init__(self, stream: ToolCallStream, described: str, tool_names: frozenset[str]) -> None:
        self._stream = stream
        self._described = described
        self._tool_names = tool_names
        self._num_calls = 0

    def feed(self, text: str) -> ToolParserOutput:
        return self._checked(_guarded(self._described, lambda: self._stream.feed(text), ToolParserOutput))

    def finish(self) -> ToolParserOutput:
        return self._checked(_guarded(self._described, self._stream.finish, ToolParserOutput))

    def _checked(self, output: ToolParserOutput) -> ToolParserOutput:
        """What is sent to a client names every call exactly once, before anything else of it, and only tools of its
        own."""
        if not isinstance(output.content, str) or not isinstance(output.calls, list):
            _fail(self._described, "gave content that is no text, or calls that are no list")
        for call in output.calls:
            if not _is_piece(call):
                _fail(self._described, f"gave a {type(call).__name__} that is no piece of a call")
            if call.name is not None and call.name not in self._tool_names:
                _fail(self._described, "gave a call of a tool that the request did not offer")
            if (call.index == self._num_calls) != (call.name is not None) or not 0 <= call.index <= self._num_calls:
                _fail(self._described, "gave a call's name never, twice, or out of order")
            self._num_calls += call.name is not None
        return output


def _is_piece(call: Any) -> bool:
    """Whether a plugin's delta has the types that it should have."""
    return (
        isinstance(call, ToolCallDelta)
        and isinstance(call.index, int)
        and isinstance(call.name, str | None)
        and isinstance(call.arguments, str)
    )


def _guarded(described: str, work: Callable[[], T], wanted: type[Any]) -> T:
    try:
        result = work()
    except Exception:  # third-party code may raise anything; the plugin is named, and only this request ends
        logger.exception("tool parser %s failed", described)
        raise _failure() from None
    if not isinstance(result, wanted):
        _fail(described, f"gave a {type(result).__name__}, which is no {wanted.__name__}")
    return result


def _fail(described: str, what: str) -> NoReturn:
    logger.error("tool parser %s %s", described, what)
    raise _failure()


def _failure() -> RequestError:
    return RequestError("the tool parser failed on this answer; the server's log says why", status=500)
