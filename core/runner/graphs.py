"""Steps replayed from device graphs: a ladder of sizes, captured at start over shared, persistent buffers.

Two families. `decode`: every row is one token; the graph goes from the step's inputs to the best token of each row, which
it writes where the next step reads it. `forward`: any rows, up to a number of tokens; the graph ends with the hidden state of
each row's last token.
A step takes the smallest graph that holds it; what is left over is padding: rows of the scratch slot without tokens, and
tokens that no row owns.

What a graph leaves behind is read before the next replay of any. So where the platform lends the memory of results, no graph
holds its own: those captured later use it again, and the ladder's logits take no more than the largest graph's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..contracts.attention import AttentionBackend
from ..contracts.model import Model
from ..contracts.platform import DeviceGraph, Platform
from ..layers.ops import OpTable
from .input_batch import InputBatch, StepRows
from .step_buffers import StepBuffers
from .step_context import StepContext
from .transfer import Transfers

Progress = Callable[[int, int], None]  # graphs captured, graphs in all

_SMALL = (1, 2, 4, 8)
_DECODE_STEP = 8
_FEW_ROWS = 8
_LARGE = 512  # tokens
_FORWARD_SIZES = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Rows of the decode graphs: 1, 2, 4, 8, then every 8 up to `max_num_seqs`, which is always one."""
    sizes = {size for size in _SMALL if size <= max_num_seqs}
    sizes.update(range(_DECODE_STEP, max_num_seqs + 1, _DECODE_STEP))
    return sorted(sizes | {max_num_seqs})


def forward_sizes(max_tokens: int, max_num_seqs: int) -> list[tuple[int, int]]:
    """(tokens, rows) of the forward graphs, ascending; `max_tokens` the largest. Large ones come with few rows, too: launches
    that have a place for each row would look at hundreds that are not there."""
    tokens = sorted({size for size in _FORWARD_SIZES if size < max_tokens} | {max_tokens})
    sizes = {(size, min(size, max_num_seqs)) for size in tokens}
    sizes.update((size, _FEW_ROWS) for size in tokens if size >= _LARGE and max_num_seqs > _FEW_ROWS)
    return sorted(sizes)


def unsupported(model: Model, backends: Iterable[AttentionBackend]) -> str | None:
    """Why no step of a model can be replayed; None where some can."""
    if not model.supports_graphs:
        return f"the model ({type(model).__name__}) says that it cannot be recorded"
    for backend in backends:
        if backend.capabilities.graph_capture == "none":
            return f"the attention backend ({type(backend).__name__}) says that it cannot be recorded"
    return None


def kept_bytes(max_rows: int, max_tokens: int, max_num_seqs: int, row_bytes: int, token_bytes: int) -> int:
    """What the results of all graphs take where memory is not lent. max_rows, max_tokens: as of GraphRunner. row_bytes: of a
    row's logits. token_bytes: of a token's hidden state."""
    decoded = sum(decode_sizes(max_rows))
    forwarded = sum(rows for _, rows in forward_sizes(max_tokens, max_num_seqs)) if max_tokens else 0
    return decoded * row_bytes + (decoded + forwarded) * token_bytes


@dataclass(slots=True, eq=False)
class DecodeResult:
    """What a decode graph left behind, first rows valid; overwritten by the next replay of any graph."""

    logits: Tensor  # float32 [R, V]
    token_ids: Tensor  # int64 [R]
    best: Tensor  # float32 [R], the largest logit


@dataclass(slots=True, eq=False)
class GraphStep:
    """A step that was replayed. decoded: None after a forward graph. hidden: [R, H], of each row's last token."""

    buffers: StepBuffers
    decoded: DecodeResult | None
    hidden: Tensor

    def over(self, lent: Callable[[Tensor], Tensor]) -> GraphStep:
        """The same with its results lent."""
        decoded = self.decoded
        if decoded is not None:
            decoded = DecodeResult(lent(decoded.logits), lent(decoded.token_ids), lent(decoded.best))
        return GraphStep(self.buffers, decoded, lent(self.hidden))


@dataclass(slots=True, eq=False)
class _Captured:
    """steps: those that Python ran; the last was the recording, and its tensors are where replays leave their results."""

    graph: DeviceGraph
    steps: list[GraphStep]

    @property
    def step(self) -> GraphStep:
        return self.steps[-1]


class GraphRunner:
    """Owns the persistent buffers and the graphs over them. max_rows: of a `decode` step. max_tokens: of a `forward` step, 0:
    none of those."""

    def __init__(
        self,
        model: Model,
        context: StepContext,
        batch: InputBatch,
        ops: OpTable,
        platform: Platform,
        transfers: Transfers,
        *,
        max_model_len: int,
        max_rows: int,
        max_tokens: int,
    ) -> None:
        self._model = model
        self._context = context
        self._batch = batch
        self._ops = ops
        self._platform = platform
        self._transfers = transfers
        self._max_model_len = max_model_len
        self._decode_sizes = decode_sizes(max_rows)
        self._forward_sizes = forward_sizes(max_tokens, batch.max_num_seqs) if max_tokens else []
        most = batch.max_num_seqs
        self._rows = torch.zeros(2 * most + 1, dtype=torch.int32, device=batch.device)
        widths = [batch.max_blocks for _ in batch.tables]
        self._buffers = StepBuffers.allocate(self._rows[:most], self._rows[most:], max(most, max_tokens), widths)
        self._last_rows: tuple[int, list[int]] = (0, [])
        self._decode: dict[int, _Captured] = {}
        self._forward: dict[tuple[int, int], _Captured] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._decode_sizes) + len(self._forward_sizes)

    # Capture

    def capture(self, progress: Progress | None = None) -> None:
        """Captures every size, the largest first, so that the smaller ones find their memory in the pool that it made."""
        captures = [partial(self._capture_forward, *size) for size in reversed(self._forward_sizes)]
        captures += [partial(self._capture_decode, size) for size in reversed(self._decode_sizes)]
        for done, capture in enumerate(captures, start=1):
            capture()
            if progress is not None:
                progress(done, self.num_graphs)

    def _persistent(self, num_rows: int, num_tokens: int) -> StepBuffers:
        slots, starts = self._rows[:num_rows], self._rows[num_rows : 2 * num_rows + 1]
        buffers = self._buffers.part(slots, starts, num_tokens)
        self._upload(num_rows, [self._batch.max_num_seqs] * num_rows + [0] * (num_rows + 1))
        return buffers

    def _prepare(self, buffers: StepBuffers, max_query_len: int) -> None:
        self._context.prepare(buffers.geometries(self._batch.block_size, max_query_len, self._max_model_len))

    def _capture_decode(self, size: int) -> None:
        buffers = self._persistent(size, size)
        found: list[GraphStep] = []

        def run() -> None:
            self._batch.fill(buffers)
            embeds = self._model.embed(buffers.input_ids)
            hidden = self._model.forward(embeds, buffers.positions, self._context)
            logits = self._model.logits(hidden)
            best, token_ids = self._ops.argmax(logits)
            self._batch.write(buffers.slots.to(torch.int64), buffers.seq_lens.to(torch.int64), token_ids)
            found.append(GraphStep(buffers, DecodeResult(logits, token_ids, best), hidden))

        self._decode[size] = self._captured(run, buffers, 1, found)

    def _capture_forward(self, num_tokens: int, num_rows: int) -> None:
        buffers = self._persistent(num_rows, num_tokens)
        found: list[GraphStep] = []

        def run() -> None:
            self._batch.fill(buffers)
            last = (buffers.starts[1:] - 1).clamp_(min=0).to(torch.int64)  # while it is recorded no row has a token
            embeds = self._model.embed(buffers.input_ids)
            hidden = self._model.forward_rows(embeds, buffers.positions, self._context, last)
            found.append(GraphStep(buffers, None, hidden))

        self._forward[num_tokens, num_rows] = self._captured(run, buffers, num_tokens, found)

    def _captured(
        self, run: Callable[[], None], buffers: StepBuffers, max_query_len: int, found: list[GraphStep]
    ) -> _Captured:
        self._prepare(buffers, max_query_len)
        run()  # compiles kernels and lets libraries make their workspaces: neither may happen during a capture
        found.clear()  # a run's logits are large, and only the recording's are ever read
        graph = self._platform.capture(run)
        found[-1] = found[-1].over(self._platform.graph_result)
        return _Captured(graph, found)

    # Replay

    def run(self, rows: StepRows, *, decode: bool) -> GraphStep | None:
        """Queues a step; None when no graph holds it. decode: each row is one token and draws the next; False: the rows'
        hidden states are wanted."""
        found = self._find(rows, decode=decode)
        if found is None:
            return None
        num_rows = len(found.step.buffers.slots)
        padding = num_rows - len(rows.requests)
        slots = [request.slot for request in rows.requests] + [self._batch.max_num_seqs] * padding
        self._upload(num_rows, slots + rows.starts + [rows.num_tokens] * padding)
        found.graph.replay()
        step = found.step
        return GraphStep(step.buffers, step.decoded, step.hidden[: len(rows.requests)])

    def _find(self, rows: StepRows, *, decode: bool) -> _Captured | None:
        """The smallest graph that holds a step."""
        num_rows = len(rows.requests)
        if decode:
            at = bisect_left(self._decode_sizes, num_rows)
            return self._decode[self._decode_sizes[at]] if at < len(self._decode_sizes) else None
        large_enough = self._forward_sizes[bisect_left(self._forward_sizes, (rows.num_tokens, 0)) :]
        return next((self._forward[size] for size in large_enough if num_rows <= size[1]), None)

    def _upload(self, num_rows: int, packed: Sequence[int]) -> None:
        """Decode steps repeat slots and starts of the step before: then nothing is copied."""
        key = (num_rows, list(packed))
        if key != self._last_rows:
            self._last_rows = key
            self._transfers.copy_into(self._rows[: len(packed)], packed)
