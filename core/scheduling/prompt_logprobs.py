"""Log-probabilities of prompt positions: gathered over chunks and restarts, handed out once, one entry per position.

Position p is about prompt token p, given those before it; position 0 has none. A step that computes tokens [s, e)
yields positions s+1 .. e, as far as the prompt goes.
"""

from __future__ import annotations

from ..contracts.plan import PositionLogprobs
from ..errors import PlanError
from ..request import Request


def store_prompt_logprobs(request: Request, covered: tuple[int, list[PositionLogprobs]] | None) -> None:
    """Keeps what a step yielded, by position, so that a chunk that is computed again after preemption changes nothing.

    Raises PlanError when positions outside the prompt are reported.
    """
    if covered is None:
        return
    first, entries = covered
    if first < 1 or first + len(entries) > len(request.prompt_logprobs):
        raise PlanError(
            f"request {request.request_id}: prompt log-probabilities for positions {first}..{first + len(entries) - 1} "
            f"of a prompt of {len(request.prompt_logprobs)} tokens"
        )
    request.prompt_logprobs[first : first + len(entries)] = entries


def take_prompt_logprobs(request: Request) -> list[PositionLogprobs] | None:
    """Entries of positions 1 .. prompt length - 1 once the prompt is computed, and never again; None before.

    Raises PlanError when the executor left a position out.
    """
    if request.num_computed_tokens < request.num_prompt_tokens:
        return None
    gathered = [entry for entry in request.prompt_logprobs[1:] if entry is not None]
    if len(gathered) != request.num_prompt_tokens - 1:
        raise PlanError(
            f"request {request.request_id}: {len(gathered)} prompt log-probabilities "
            f"for {request.num_prompt_tokens} tokens"
        )
    request.prompt_logprobs_pending = False
    request.prompt_logprobs = []
    return gathered
