"""Tool parser `hermes`: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes, Qwen2.5 and Qwen3 write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.tool_parser import ToolParserProvider

from .json_calls import CallFormat, JsonCallParser

FORMAT: Final = CallFormat(
    opening="<tool_call>",
    closing="</tool_call>",
    bare=False,
    separator="",
    arguments_keys=frozenset(["arguments", "parameters"]),
    any_key=True,
)
# Formats that have the same mark and something else than JSON in it.
_OTHER_FORMATS: Final = ("<function=", "<arg_key>")


def _detect(chat_template: str) -> bool:
    return (
        FORMAT.opening in chat_template
        and "arguments" in chat_template
        and not any(mark in chat_template for mark in _OTHER_FORMATS)
    )


@hookimpl
def hotswap_tool_parser() -> Iterator[ToolParserProvider]:
    yield ToolParserProvider(
        name="hermes",
        build=lambda context: JsonCallParser(FORMAT),
        detect=_detect,
        priority=10,
        summary="calls as JSON between <tool_call> and </tool_call>: Hermes, Qwen2.5, Qwen3",
    )
