"""The backend around one of the FlashAttentions."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from hotswap.core.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    BatchGeometry,
    Capabilities,
    LayerCache,
)

from ..half_precision import DTYPES
from ..token_major import OncePerPass, SlotWriter, token_major, visible_blocks
from .calls import CALLS, Step
from .versions import Version


class FlashAttention(AttentionBackend):
    """`prepare` looks at nothing, and each call is queued without a wait, so that steps can be captured: those that the
    version's `graph_capture` says."""

    def __init__(self, version: Version) -> None:
        self.capabilities = Capabilities(
            dtypes=DTYPES, window=True, soft_cap=True, non_causal=True, graph_capture=version.graph_capture
        )
        self.layout = token_major(version.block_sizes)
        self._call = CALLS[version.number]()
        self._sums_lengths = version.number == 2
        self._geometry: BatchGeometry | None = None
        self._writer = SlotWriter()
        self._steps: OncePerPass[Step] = OncePerPass()

    def prepare(self, geometry: BatchGeometry) -> None:
        self._geometry = geometry
        self._writer.clear()
        self._steps.clear()

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None:
        self._writer.write(key, value, cache, self._prepared().slot_mapping)

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        step = self._steps.get(layer.index, layer.window, lambda: self._step(layer.window))
        return self._call(query, cache, layer, step).contiguous()

    def _step(self, window: int | None) -> Step:
        geometry = self._prepared()
        table, seq_lens = visible_blocks(geometry, window)
        return Step(
            geometry=geometry,
            starts=geometry.query_start_loc[: geometry.num_requests + 1],
            seq_lens=seq_lens,
            table=table,
            key_starts=F.pad(seq_lens.cumsum(0, dtype=seq_lens.dtype), (1, 0)) if self._sums_lengths else None,
        )

    def _prepared(self) -> BatchGeometry:
        if self._geometry is None:
            raise RuntimeError("prepare() must come before the first layer of a step")
        return self._geometry
