"""When a request ends by a token it drew."""

from __future__ import annotations

from ..request import Request


def stopping_token_ids(request: Request) -> frozenset[int]:
    """Every token that may end the request; computed once, at admission."""
    sampling = request.sampling
    eos = () if sampling.ignore_eos else sampling.eos_token_ids
    return frozenset(eos).union(sampling.stop_token_ids)


def stop_by_token(request: Request, token_id: int) -> tuple[str, int | None] | None:
    """(finish reason, stop reason) when `token_id`, just appended, is in `stopping_ids` and ends the request; None when
    it does not.

    Below min_tokens nothing stops. The stop reason is the token id, except for the end of sequence, where it is None.
    """
    sampling = request.sampling
    if len(request.output_token_ids) < sampling.min_tokens:
        return None
    if not sampling.ignore_eos and token_id in sampling.eos_token_ids:
        return "stop", None
    return "stop", token_id
