"""Log-probabilities of a prompt's own tokens, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contracts.model import Model
from ..contracts.plan import PositionLogprobs
from ..layers.ops import OpTable
from .input_batch import BatchRequest, StepRows
from .logprobs import position_logprobs
from .transfer import Download, Transfers

SLICE = 64  # rows of logits that exist at once


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Hidden rows whose next tokens belong to the prompt. place: the row in the step. first: the position that the
    first of them predicts."""

    request: BatchRequest
    place: int
    first: int
    hidden: Tensor
    count: int  # alternatives


@dataclass(slots=True)
class PromptDescription:
    """What is known of a chunk once the device is done."""

    place: int
    first: int
    count: int
    slices: list[Download]

    def entries(self) -> list[PositionLogprobs] | None:
        """One entry a position; None when some logits were not finite."""
        found: list[PositionLogprobs] = []
        for download in self.slices:
            ids, logprobs, ranks, best = download.wait()
            if not bool(torch.isfinite(best).all()):
                return None
            found += position_logprobs(ids, logprobs, ranks, [self.count] * len(ids))
        return found


def owes_prompt(rows: StepRows, counts: Mapping[int, int]) -> bool:
    """Whether a row of this step has hidden states that `prompt_chunks` wants."""
    return any(
        request.request_id in counts and before + 1 < request.num_prompt_tokens
        for request, before in zip(rows.requests, rows.before, strict=True)
    )


def prompt_chunks(rows: StepRows, hidden: Tensor, counts: Mapping[int, int]) -> list[PromptChunk]:
    """Hidden rows of a step that predict a prompt token, per request that asked. counts: request -> alternatives."""
    chunks = []
    for place, request in enumerate(rows.requests):
        count = counts.get(request.request_id)
        if count is None:
            continue
        start, first = rows.starts[place], rows.before[place] + 1
        stop = min(rows.starts[place + 1], start + request.num_prompt_tokens - first)
        if stop > start:
            chunks.append(PromptChunk(request, place, first, hidden[start:stop], count))
    return chunks


def describe_prompt(
    chunk: PromptChunk, tokens: Tensor, model: Model, ops: OpTable, transfers: Transfers
) -> PromptDescription:
    """tokens: int64, those that the chunk's rows predict."""
    slices = describe_hidden(chunk.hidden, tokens, chunk.count, model, ops, transfers)
    return PromptDescription(chunk.place, chunk.first, chunk.count, slices)


def describe_hidden(
    hidden: Tensor, tokens: Tensor, count: int, model: Model, ops: OpTable, transfers: Transfers
) -> list[Download]:
    """What `PromptDescription.slices` holds."""
    found = []
    for start in range(0, len(hidden), SLICE):
        logits = model.logits(hidden[start : start + SLICE])
        described = ops.gather_logprobs(logits, tokens[start : start + SLICE], count)
        found.append(transfers.download(*described, logits.amax(1)))
    return found
