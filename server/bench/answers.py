"""What the chunks of completions and chat say, whoever sends them: only what is there is relied upon."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Event:
    """One chunk's content. text, token_ids: of all its choices together; token_ids is None when it does not say. error: kind
    and detail of an error event. has_choice: there was a choice at all. logprobs: (token, value) of the chosen tokens."""

    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: tuple[str, str] | None = None
    has_choice: bool = False
    logprobs: list[tuple[str, float]] = field(default_factory=list)


def read_event(data: str) -> Event:
    """Never raises: what cannot be read is an error event."""
    try:
        value = json.loads(data)
    except ValueError:
        return Event(error=("broken event", data[:200]))
    if not isinstance(value, dict):
        return Event(error=("broken event", data[:200]))
    if value.get("error"):
        error = value["error"]
        message = error.get("message", "no reason given") if isinstance(error, dict) else error
        return Event(error=("error event", " ".join(str(message).split())[:300]))
    event = Event(usage=value["usage"] if isinstance(value.get("usage"), dict) else None)
    choices = value.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict):
            _add_choice(event, choice)
    return event


def _add_choice(event: Event, choice: dict[str, Any]) -> None:
    event.has_choice = True
    event.text += choice_text(choice)
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        event.token_ids = (event.token_ids or []) + ids
    event.finish_reason = choice.get("finish_reason") or event.finish_reason
    event.logprobs += chosen_logprobs(choice.get("logprobs"))


def choice_text(choice: dict[str, Any]) -> str:
    """Text of a choice, whole or a chunk's, of either endpoint; reasoning and the arguments of tool calls are output
    too."""
    text = choice.get("text")
    if isinstance(text, str):
        return text
    part = choice.get("delta") if isinstance(choice.get("delta"), dict) else choice.get("message")
    if not isinstance(part, dict):
        return ""
    pieces = [part.get(name) for name in ("reasoning_content", "reasoning", "content", "refusal")]
    calls = part.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        pieces.append(function.get("arguments") if isinstance(function, dict) else None)
    return "".join(piece for piece in pieces if isinstance(piece, str))


def chosen_logprobs(value: Any) -> list[tuple[str, float]]:
    """Of either endpoint's `logprobs`. What has no number is left out."""
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("content"), list):
        entries = [(e.get("token"), e.get("logprob")) for e in value["content"] if isinstance(e, dict)]
    else:
        entries = list(zip(value.get("tokens") or (), value.get("token_logprobs") or (), strict=False))
    return [(str(token), float(chance)) for token, chance in entries if isinstance(chance, (int, float))]


def cached_tokens(usage: dict[str, Any]) -> int | None:
    """Prompt tokens that a prefix cache held; None when the server does not say."""
    details = usage.get("prompt_tokens_details")
    value = details.get("cached_tokens") if isinstance(details, dict) else None
    return value if isinstance(value, int) else None
