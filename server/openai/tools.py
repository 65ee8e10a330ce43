"""Tools in chat: what a request may ask, and one choice's text taken apart into words for the user and calls.

The whole answer and the stream are made from the same pieces, so they agree.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Final

from hotswap.core.contracts.tool_parser import ToolParser, ToolParserOutput
from hotswap.core.errors import RequestError
from hotswap.core.outputs import CompletionOutput
from hotswap.core.text.tools import check_tools, tool_names

from ..engine_surface import ServedEngine
from .protocol import ChatRequest

FINISH_REASON: Final = "tool_calls"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request's tools come to.

    shown: for the template; None when there are none or they are hidden. parser: None when the answer is only text.
    """

    shown: list[dict[str, Any]] | None = None
    parser: ToolParser | None = None
    names: frozenset[str] = frozenset()
    only_one: bool = False


def tool_use(request: ChatRequest, engine: ServedEngine, *, auto_allowed: bool) -> ToolUse:
    """Raises RequestError (400) for tools that are wrong and for a choice that is not served.

    auto_allowed: --enable-auto-tool-choice.
    """
    tools = None if request.tools is None else check_tools(request.tools)
    names = frozenset[str]() if tools is None else tool_names(tools)
    choice = request.tool_choice if "tool_choice" in request.model_fields_set else "none" if tools is None else "auto"
    if choice is None or choice == "none":
        return ToolUse()
    _check_choice(choice, names)
    if tools is None:
        raise RequestError("tool_choice auto needs tools", param="tool_choice")
    if not auto_allowed:
        raise RequestError(
            "tools with tool_choice auto are turned off by --no-enable-auto-tool-choice; tool_choice none is served",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if engine.tool_parser is None:
        raise RequestError(
            "tools need a tool parser, and none fits this model's chat template; start the server with "
            f"--tool-call-parser NAME{_parsers(engine)}, or send tool_choice none",
            param="tools",
            code="unsupported_parameter",
        )
    return ToolUse(tools, engine.tool_parser, names, request.parallel_tool_calls is False)


def _check_choice(choice: Any, names: frozenset[str]) -> None:
    """Everything but auto is refused, with the reason."""
    if choice == "auto":
        return
    if choice == "required":
        if not names:
            raise RequestError("tool_choice required needs tools", param="tool_choice")
        raise _not_served("tool_choice required")
    if not isinstance(choice, dict):
        raise RequestError("tool_choice must be none, auto, required or a function", param="tool_choice")
    function = choice.get("function")
    if choice.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            'as an object, tool_choice must be {"type": "function", "function": {"name": "..."}}', param="tool_choice"
        )
    if function["name"] not in names:
        raise RequestError("tool_choice names a function that is not among tools", param="tool_choice")
    raise _not_served("tool_choice with a named function")


def _not_served(what: str) -> RequestError:
    return RequestError(
        f"{what} is not served by this version: it needs constrained output; auto and none are",
        param="tool_choice",
        code="unsupported_parameter",
    )


def _parsers(engine: ServedEngine) -> str:
    rows = engine.info.inventory
    names = [row["name"] for row in rows if row["kind"] == "tool_parser" and row["state"] in ("active", "available")]
    return f" ({', '.join(names)})" if names else ""


@dataclass(slots=True)
class Piece:
    """What a delta of the engine adds to a choice. calls: entries of `delta.tool_calls`."""

    content: str
    finish_reason: str | None
    stop_reason: int | str | None
    calls: list[dict[str, Any]] = field(default_factory=list)


class ChoiceText:
    """One choice's text, piece by piece. Owned by that choice: choices share nothing (I07)."""

    def __init__(self, use: ToolUse) -> None:
        self._stream = None if use.parser is None else use.parser.stream(use.names)
        self._only_one = use.only_one
        self._num_calls = 0

    def read(self, choice: CompletionOutput) -> Piece:
        """The piece's finish_reason ends the choice; it may come before the engine's own.

        Raises RequestError (500) when the parser fails.
        """
        piece = Piece("", choice.finish_reason, choice.stop_reason)
        if self._stream is None:
            piece.content = choice.text
            return piece
        # One call at most: where the second one begins must not depend on how the text was cut.
        for text in choice.text if self._only_one else (choice.text,):
            if self._add(self._stream.feed(text), piece):
                return piece
        if choice.finish_reason is not None and self._add(self._stream.finish(), piece):
            return piece
        if choice.finish_reason == "stop" and self._num_calls:
            piece.finish_reason = FINISH_REASON
        return piece

    def _add(self, output: ToolParserOutput, piece: Piece) -> bool:
        """Whether a second call begins where one is the most: that ends the choice."""
        piece.content += output.content
        for delta in output.calls:
            if self._only_one and delta.index > 0:
                piece.finish_reason, piece.stop_reason = FINISH_REASON, None
                return True
            if delta.name is not None:
                self._num_calls += 1
                function = {"name": delta.name, "arguments": delta.arguments}
                entry = {"index": delta.index, "id": f"call_{uuid.uuid4().hex}", "type": "function"}
                piece.calls.append({**entry, "function": function})
            elif delta.arguments:
                self._append(piece.calls, delta.index, delta.arguments)
        return False

    @staticmethod
    def _append(calls: list[dict[str, Any]], index: int, arguments: str) -> None:
        if calls and calls[-1]["index"] == index:
            calls[-1]["function"]["arguments"] += arguments
        else:
            calls.append({"index": index, "function": {"arguments": arguments}})


class WholeText:
    """A choice's pieces put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: dict[int, tuple[dict[str, Any], list[str]]] = {}
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        self._content.append(piece.content)
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        for entry in piece.calls:
            _, arguments = self._calls.setdefault(entry["index"], (entry, []))
            arguments.append(entry["function"]["arguments"])

    def message(self, prefix: str) -> dict[str, Any]:
        """prefix: what the content begins with beside the choice's own."""
        content = prefix + "".join(self._content)
        calls = [
            {
                "id": first["id"],
                "type": "function",
                "function": {"name": first["function"]["name"], "arguments": "".join(arguments)},
            }
            for first, arguments in self._calls.values()
        ]
        message: dict[str, Any] = {"role": "assistant", "content": content or ("" if not calls else None)}
        message["refusal"] = None
        return {**message, "tool_calls": calls} if calls else message
