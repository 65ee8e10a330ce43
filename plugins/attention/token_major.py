"""What backends over other people's kernels share: a cache in the order [block, token, head, dim], and the tensor work around
those kernels. All of it is queued on the device and waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hotswap.core.contracts.attention import BatchGeometry, KVLayout, LayerCache

T = TypeVar("T")

_DIMENSIONS = ("block", "token", "head", "dim")


def token_major(block_sizes: tuple[int, ...]) -> KVLayout:
    """The layout, for a backend that takes these block sizes."""
    return KVLayout("token_major", _DIMENSIONS, _DIMENSIONS, block_sizes)


class OncePerPass(Generic[T]):
    """A value that is the same in all layers of a step, made at the first of them.

    A graph is recorded by running the layers a second time after one `prepare`, and replayed over tensors that changed since.
    So the value is made again when a layer comes that has been there: then a recorded pass holds the work that makes it.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._values: dict[Hashable, T] = {}

    def clear(self) -> None:
        self._seen.clear()
        self._values.clear()

    def get(self, layer: Hashable, variant: Hashable, make: Callable[[], T]) -> T:
        """layer: who asks. variant: layers that differ in it have values of their own."""
        if layer in self._seen:
            self.clear()
        self._seen.add(layer)
        if variant not in self._values:
            self._values[variant] = make()
        return self._values[variant]


class SlotWriter:
    """`write_kv` for a token-major cache, with no wait for the device to count the tokens that are written."""

    def __init__(self) -> None:
        self._targets: OncePerPass[tuple[Tensor, Tensor]] = OncePerPass()

    def clear(self) -> None:
        """At `prepare`."""
        self._targets.clear()

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
        slots, written = self._targets.get(cache[0].data_ptr(), None, lambda: _targets(slot_mapping))
        for new, stored in zip((key, value), cache, strict=True):
            by_slot = stored.view(-1, *stored.shape[2:])
            # A token that is not written puts back what is there: in slot 0, of the null block, which no other token writes.
            kept = torch.where(written, new[: len(slots)].to(stored.dtype), by_slot[slots])
            by_slot.index_put_((slots,), kept)


def _targets(slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """The slots with 0 in place of -1, and bool [T, 1, 1]: which ones are written."""
    return slot_mapping.clamp(min=0), (slot_mapping >= 0)[:, None, None]


def visible_blocks(step: BatchGeometry, window: int | None) -> tuple[Tensor, Tensor]:
    """int32 [R, max_blocks], int32 [R]: the block table and the context lengths without the blocks that are behind the
    windows of all queries.

    Those are the null block by now, or anything. Kernels count positions from a context's end, so they miss nothing; left in,
    they would read some of these blocks and give their values a weight of zero, and zero times NaN is NaN.
    """
    table, seq_lens = step.block_table[: step.num_requests], step.seq_lens[: step.num_requests]
    if window is None:
        return table, seq_lens
    starts = step.query_start_loc[: step.num_requests + 1]
    first = blocks_behind(seq_lens, starts.diff(), window, step.block_size)
    columns = torch.arange(table.shape[1], device=table.device) + first[:, None]
    return table.gather(1, columns.clamp(max=table.shape[1] - 1)), seq_lens - first * step.block_size


def blocks_behind(seq_lens: Tensor, new_tokens: Tensor, window: int, block_size: int) -> Tensor:
    """[R], in the arguments' dtype: how many of each request's first blocks none of its queries sees."""
    seen_first = seq_lens - new_tokens - (window - 1)
    return seen_first.clamp(min=0).div(block_size, rounding_mode="floor")
