"""What a front end and the engine say about a prompt's token ids."""

from __future__ import annotations

from ..errors import RequestError


def outside_width(token_ids: list[int], width: int) -> RequestError:
    """The error for a prompt with a token id that no row of logits has."""
    bad = next((i for i in token_ids if not (isinstance(i, int) and 0 <= i < width)), None)
    return RequestError(f"prompt: token id {bad!r:.80} is outside 0..{width - 1}", param="prompt")
