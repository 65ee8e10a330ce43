"""Tool parser `llama3_json`: {"name": ..., "parameters": {...}} as the answer itself, as Llama 3.1 and 3.2 write it.

A call begins at the start of the answer, after another call, or after <|python_tag|>; `;` may stand between calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.tool_parser import ToolParserProvider

from .json_calls import CallFormat, JsonCallParser

FORMAT: Final = CallFormat(
    opening="<|python_tag|>",
    closing="",
    bare=True,
    separator=";",
    arguments_keys=frozenset(["parameters", "arguments"]),
    any_key=False,
)
_TEMPLATE_HAS: Final = ("<|start_header_id|>", "ipython", "parameters")


def _detect(chat_template: str) -> bool:
    return all(word in chat_template for word in _TEMPLATE_HAS)


@hookimpl
def hotswap_tool_parser() -> Iterator[ToolParserProvider]:
    yield ToolParserProvider(
        name="llama3_json",
        build=lambda context: JsonCallParser(FORMAT),
        detect=_detect,
        summary="calls as bare JSON, after <|python_tag|> or not: Llama 3.1, 3.2",
    )
