"""The check at the door: whether a request can ever be served, and how many tokens it may produce."""

from __future__ import annotations

from ..errors import RequestError
from ..request import Request
from .limits import SchedulingLimits
from .stop import stopping_token_ids


def check_request(request: Request, limits: SchedulingLimits, window: int, num_waiting: int) -> None:
    """Raises RequestError: 400 for a request that can never be served, 429 when the queue is full.

    window: the effective one, so that a prompt that passes always fits the empty pool.
    """
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens", param="prompt")
    if num_prompt >= window:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, but the context window is {window} tokens "
            "and at least one must be left to answer",
            param="prompt",
            code="context_length_exceeded",
        )
    if limits.max_num_queued_reqs is not None and num_waiting >= limits.max_num_queued_reqs:
        raise RequestError(
            f"{num_waiting} requests are waiting, which is the limit (max_num_queued_reqs); try again later",
            code="queue_full",
            status=429,
        )


def prepare_request(request: Request, window: int) -> None:
    """Sets what is derived once: the output limit, the stopping tokens, the room for prompt log-probabilities."""
    room = window - request.num_prompt_tokens
    asked = request.sampling.max_tokens
    request.max_tokens = room if asked is None else min(asked, room)
    request.stopping_ids = stopping_token_ids(request)
    if request.sampling.prompt_logprobs is not None:
        request.prompt_logprobs_pending = True
        request.prompt_logprobs = [None] * request.num_prompt_tokens
