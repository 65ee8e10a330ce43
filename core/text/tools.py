"""The tools of a request: what is refused before a template or a parser sees them. For every front end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..errors import RequestError
from .messages import plain_data

MAX_TOOLS: Final = 128
MAX_TOOLS_CHARS: Final = 1 << 18  # of all strings and keys in them
TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """A copy of `tools` in plain data. Raises RequestError naming the field.

    Each is {"type": "function", "function": {"name", "description", "parameters"}}; parameters is an object (a JSON
    schema, not looked into), names are unique. Members of no meaning here are kept: the template may print them.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise RequestError("tools must be a list", param="tools")
    if not tools:
        raise RequestError("tools is an empty list: leave it out, or give a tool", param="tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS}", param="tools")
    checked: list[dict[str, Any]] = []
    names = set[str]()
    left = MAX_TOOLS_CHARS
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if not isinstance(tool, Mapping):
            raise RequestError(f"{where} must be an object", param=where)
        plain = plain_data(tool, where)
        left -= _num_chars(plain, left)
        if left < 0:
            raise RequestError(f"tools are larger than {MAX_TOOLS_CHARS} characters together", param="tools")
        name = _check_tool(plain, where)
        if name in names:
            raise RequestError(f"{where}.function.name: two tools have this name", param=f"{where}.function.name")
        names.add(name)
        checked.append(plain)
    return checked


def tool_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names in what `check_tools` returned."""
    return frozenset(tool["function"]["name"] for tool in tools)


def _check_tool(tool: dict[str, Any], where: str) -> str:
    if tool.get("type") != "function":
        raise RequestError(f"{where}.type must be function", param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function must be an object", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must be 1 to 64 letters, digits, '_' or '-'", param=f"{where}.function.name"
        )
    for key, kind, expected in (("description", str, "a string"), ("parameters", dict, "an object")):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise RequestError(f"{where}.function.{key} must be {expected}", param=f"{where}.function.{key}")
    if function.get("strict") not in (None, False):
        raise RequestError(
            f"{where}.function.strict needs constrained output, which is not served by this version; leave it out",
            param=f"{where}.function.strict",
            code="unsupported_parameter",
        )
    return name


def _num_chars(value: Any, limit: int) -> int:
    """About how long the data is as text. Stops counting beyond `limit`."""
    left, total = [value], 0
    while left and total <= limit:
        item = left.pop()
        total += len(item) if isinstance(item, str) else 4
        if isinstance(item, dict):
            total += sum(map(len, item))
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return total
