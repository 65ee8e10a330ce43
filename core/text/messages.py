"""Brings the messages of a request into the one form that templates see, or says what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError

ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_DEPTH = 128


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked copies of `messages`, nothing of the caller's shared.

    content: a string or a list of text parts becomes one string, parts joined without a separator: equal text, equal
        prompt. null becomes "" and is allowed only in an assistant's message with tool calls.
    tool_calls: only in an assistant's message; an empty list is as if it were missing. Arguments: a JSON string becomes
        the object it spells; "" means no arguments.
    Fields that are null are dropped: templates handle a missing field, not all handle null.
    Raises RequestError naming the field.
    """
    if not messages:
        raise RequestError("messages must hold at least one message", param="messages")
    return [_normalize_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _normalize_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise RequestError(
            f"{where}.role must be a role such as system, user, assistant or tool", param=f"{where}.role"
        )
    result = {key: plain_data(value, f"{where}.{key}") for key, value in message.items() if value is not None}
    calls = result.get("tool_calls")
    if calls is not None:
        result["tool_calls"] = _normalize_tool_calls(calls, f"{where}.tool_calls")
        if not calls:
            del result["tool_calls"]
        elif role != "assistant":
            raise RequestError(f"{where}.tool_calls: only the assistant makes tool calls", param=f"{where}.tool_calls")
    if not isinstance(result.get("tool_call_id", ""), str):
        raise RequestError(f"{where}.tool_call_id must be a string", param=f"{where}.tool_call_id")
    if "content" in result:
        result["content"] = _join_content(result["content"], f"{where}.content")
    elif role == "assistant" and calls:
        result["content"] = ""
    else:
        raise RequestError(
            f"{where}.content must be a string or a list of text parts; null is only for an assistant's message "
            "with tool_calls",
            param=f"{where}.content",
        )
    return result


def _join_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts", param=where)
    texts: list[str] = []
    for n, part in enumerate(content):
        if not isinstance(part, dict):
            raise RequestError(
                f'{where}[{n}] must be an object such as {{"type": "text", "text": "..."}}', param=f"{where}[{n}]"
            )
        if part.get("type") != "text":
            raise RequestError(
                f"{where}[{n}].type must be text: this model reads text only", param=f"{where}[{n}].type"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{n}].text must be a string", param=f"{where}[{n}].text")
        texts.append(part["text"])
    return "".join(texts)


def _normalize_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", param=where)
    for n, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{n}].function must be an object with a name", param=f"{where}[{n}].function")
        if not isinstance(call.get("id", ""), str | None):
            raise RequestError(f"{where}[{n}].id must be a string", param=f"{where}[{n}].id")
        if call.get("type") not in (None, "function"):
            raise RequestError(f"{where}[{n}].type must be function", param=f"{where}[{n}].type")
        function["arguments"] = _parse_arguments(function.get("arguments", ""), f"{where}[{n}].function.arguments")
    return calls


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse_arguments(arguments: Any, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        if arguments == "":
            return {}
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise RequestError(f"{where} must be an object or a string that spells one in JSON", param=where) from None
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} must be an object or a string that spells one in JSON", param=where)
    plain: dict[str, Any] = plain_data(arguments, where)
    return plain


def plain_data(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of plain JSON types only, so that a template meets no object with methods of its own."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {MAX_DEPTH} deep", param=where)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, where, depth + 1) for item in value]
    raise RequestError(f"{where} must be JSON data, not {type(value).__name__}", param=where)
