"""Log-probabilities in OpenAI's two shapes and in vLLM's shape for prompts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from hotswap.core.outputs import Logprob, TokenLogprobs

FLOOR = -9999.0  # what -inf becomes: JSON has no infinity


def _value(logprob: float) -> float:
    return max(logprob, FLOOR) if logprob == logprob else FLOOR


def chat_logprobs(positions: Sequence[TokenLogprobs], num_top: int, *, as_token_ids: bool) -> dict[str, Any]:
    """`choices[].logprobs` of chat. Joined `bytes` are the exact UTF-8 of the text."""
    content = []
    for position in positions:
        ranked = sorted(position.items(), key=lambda item: item[1].rank)[:num_top]
        token_id, chosen = next(iter(position.items()))
        entry = _chat_entry(token_id, chosen, as_token_ids)
        entry["top_logprobs"] = [_chat_entry(i, logprob, as_token_ids) for i, logprob in ranked]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, logprob: Logprob, as_token_ids: bool) -> dict[str, Any]:
    token = f"token_id:{token_id}" if as_token_ids else logprob.decoded_token
    return {"token": token, "logprob": _value(logprob.logprob), "bytes": list(logprob.bytes)}


class CompletionLogprobs:
    """`choices[].logprobs` of /v1/completions, for one choice; made delta by delta, so that offsets go on.

    text_offset counts characters from the start of the returned text (the echoed prompt included). A token that
    completes no character, and one that is not shown (BOS), has the offset of what follows it.
    """

    def __init__(self, hidden_ids: Collection[int], *, as_token_ids: bool) -> None:
        self._hidden = hidden_ids
        self._as_token_ids = as_token_ids
        self._offset = 0

    def add(
        self, positions: Sequence[TokenLogprobs | None], first_token: tuple[int, str, bytes] | None = None
    ) -> dict[str, Any]:
        """The object for these positions. A None position is a prompt's first token, given as (id, text, bytes)."""
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for position in positions:
            if position is None:
                token_id, text, data = first_token if first_token is not None else (0, "", b"")
                tokens.append(self._name(token_id, text, data))
                token_logprobs.append(None)
                top_logprobs.append(None)
            else:
                token_id, chosen = next(iter(position.items()))
                text = chosen.decoded_token
                tokens.append(self._name(token_id, text, chosen.bytes))
                token_logprobs.append(_value(chosen.logprob))
                top_logprobs.append(
                    {self._name(i, e.decoded_token, e.bytes): _value(e.logprob) for i, e in position.items()}
                )
            offsets.append(self._offset)
            if token_id not in self._hidden:
                self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _name(self, token_id: int, text: str, data: bytes) -> str:
        """The token's text; for a token that is only part of a character, OpenAI's `bytes:\\xf0\\x9f` spelling."""
        if self._as_token_ids:
            return f"token_id:{token_id}"
        if data and text.encode() != data:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return text


def prompt_logprobs(positions: Sequence[TokenLogprobs | None], *, as_token_ids: bool) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: null for the first token, then token id -> logprob, rank, decoded_token."""
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": _value(entry.logprob),
                "rank": entry.rank,
                "decoded_token": f"token_id:{token_id}" if as_token_ids else entry.decoded_token,
            }
            for token_id, entry in position.items()
        }
        for position in positions
    ]
