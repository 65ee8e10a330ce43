"""Attention under the geometries that steps come in, tried before serving: a kernel that is compiled for how many rows there
are, or how a context is cut, would otherwise be compiled when the first such step comes, while all requests wait.

What a backend compiles for is its own affair. Known here is what it is told: rows, the most new tokens of one, the longest
context. Doubling each finds every variant that a threshold among them can select.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contracts.attention import AttentionLayer
from .step_buffers import StepBuffers
from .step_context import StepContext
from .transfer import Transfers

_FEW_TOKENS = 2  # of a row, at most
_MANY_TOKENS = 16  # more than attention treats like one
_SHORTEST = 16  # tokens of a context
_LONGEST = 4096  # above, contexts no longer differ in how they are cut
_CUT_ROWS = 2  # rows that leave enough of a device free to cut contexts, whatever it is


def doubled(first: int, last: int) -> list[int]:
    """first, twice that and so on, and `last`; none above it."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


@dataclass(frozen=True, slots=True)
class Claim:
    """A step as a backend is told of it: the first `tokens` tokens, in `rows` rows of equal length; the others are upper
    bounds."""

    tokens: int
    rows: int
    max_query_len: int
    max_seq_len: int


def claims(num_tokens: int, max_rows: int, max_model_len: int) -> Iterator[Claim]:
    """Of a step of `num_tokens` tokens. One token has its own: its tensors' strides may differ from those of several."""
    lengths = doubled(_SHORTEST, min(max_model_len, _LONGEST))
    if max_model_len > _LONGEST:
        lengths.append(max_model_len)
    if num_tokens == 1:
        yield from (Claim(1, 1, 1, length) for length in lengths)
        return
    for rows in doubled(1, min(max_rows, num_tokens)):
        # With more rows there is less to cut; the longest context then shows how it is done.
        for length in lengths if rows <= _CUT_ROWS else lengths[-1:]:
            if rows > 1:
                yield Claim(rows, rows, 1, length)
            for most in (_FEW_TOKENS, _MANY_TOKENS):
                each = min(most, num_tokens // rows)
                if each > 1:
                    yield Claim(each * rows, rows, most, length)


class TryingContext:
    """The ForwardContext of a trial step: the first layer of each kind attends under every claim, then as the step is.

    buffers, max_query_len, max_seq_len: the step, whose contexts are its own tokens; nothing is written.
    """

    def __init__(
        self,
        context: StepContext,
        buffers: StepBuffers,
        block_size: int,
        max_query_len: int,
        max_seq_len: int,
        trials: Sequence[Claim],
        transfers: Transfers,
    ) -> None:
        self._context = context
        self._buffers = buffers
        self._block_size = block_size
        self._trials = trials
        self._transfers = transfers
        self._step = buffers.geometries(block_size, max_query_len, max_seq_len)
        self._known: set[tuple[object, ...]] = set()
        context.prepare(self._step)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor | None = None,
        cos_sin: Tensor | None = None,
    ) -> Tensor:
        kind = (
            replace(layer, index=0),
            layer.sinks is None,
            layer.alibi_slopes is None,
            positions is None,
            cos_sin is None,
        )
        if kind not in self._known:
            self._known.add(kind)
            for claim in self._trials:
                part = slice(claim.tokens)
                self._claim(claim)
                its_positions = None if positions is None else positions[part]
                self._context.attend(layer, query[part], key[part], value[part], its_positions, cos_sin)
            self._context.prepare(self._step)
        return self._context.attend(layer, query, key, value, positions, cos_sin)

    def _claim(self, claim: Claim) -> None:
        each = claim.tokens // claim.rows
        starts = self._transfers.upload(list(range(0, claim.tokens + 1, each)), torch.int32)
        buffers = self._buffers.part(self._buffers.slots[: claim.rows], starts, claim.tokens)
        buffers.seq_lens = torch.full_like(buffers.seq_lens, each)
        self._context.prepare(buffers.geometries(self._block_size, claim.max_query_len, claim.max_seq_len))
