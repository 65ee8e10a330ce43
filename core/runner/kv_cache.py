"""How large the KV cache is, what it is made of, and the table of memory parts that start-up logs.

The arithmetic is in pure functions; nothing here measures a device (the platform does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..config import CacheConfig
from ..contracts.attention import CacheSpec, KVLayout
from ..contracts.platform import Platform
from ..errors import ModelLoadError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

GIB = 2**30


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of one spec, which share block tables. layers: their places in the model."""

    spec: CacheSpec
    layers: tuple[int, ...]


def group_layers(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Groups equal specs, in order of first appearance; layers of kind "none" keep nothing and belong to no group."""
    found: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if spec.kind != "none":
            found.setdefault(spec, []).append(layer)
    return tuple(CacheGroup(spec, tuple(layers)) for spec, layers in found.items())


def bytes_per_block(groups: Sequence[CacheGroup], block_size: int) -> int:
    """Bytes that one block number takes, over all layers of all groups."""
    return block_size * sum(group.spec.bytes_per_token * len(group.layers) for group in groups)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of the KV cache. num_blocks: usable ones; the tensors hold one more, the null block 0.

    reason: where the size comes from, for the log.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    reason: str

    @property
    def num_tokens(self) -> int:
        """What one request can hold at most if it has the cache to itself."""
        return self.num_blocks * self.block_size

    @property
    def total_bytes(self) -> int:
        return (self.num_blocks + 1) * self.block_bytes


def plan_cache(groups: Sequence[CacheGroup], cache: CacheConfig, measured_bytes: int) -> CachePlan:
    """Sizes the cache: --num-gpu-blocks-override, else --kv-cache-memory-bytes, else `measured_bytes` of the platform.

    Raises UsageError when not even one usable block fits.
    """
    block_bytes = bytes_per_block(groups, cache.block_size)
    if not block_bytes:
        raise ModelLoadError("no layer of this model keeps anything in the KV cache: it cannot generate token by token")
    if cache.num_gpu_blocks_override is not None:
        return CachePlan(cache.num_gpu_blocks_override, cache.block_size, block_bytes, "--num-gpu-blocks-override")
    if cache.kv_cache_memory_bytes is not None:
        given, reason = cache.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    else:
        given, reason = measured_bytes, "measured free memory"
    num_blocks = given // block_bytes - 1  # the null block takes its share
    if num_blocks < 1:
        raise UsageError(
            f"the KV cache would get {given:,} bytes ({reason}); the smallest useful one takes {2 * block_bytes:,} "
            f"(two blocks of {cache.block_size} tokens). Give it more with --kv-cache-memory-bytes, free memory, "
            "or make blocks smaller with --block-size or --kv-cache-dtype bfloat16"
        )
    return CachePlan(num_blocks, cache.block_size, block_bytes, reason)


@dataclass(slots=True)
class MemoryTable:
    """Parts of memory, in bytes, for the start-up log. planned: those that were measured and are not there, or not yet."""

    rows: list[tuple[str, int]] = field(default_factory=list)
    planned: set[str] = field(default_factory=set)

    def add(self, part: str, num_bytes: int) -> None:
        self.rows.append((part, num_bytes))

    def plan(self, part: str, num_bytes: int) -> None:
        self.add(part, num_bytes)
        self.planned.add(part)

    def take(self, part: str) -> None:
        """What was planned is there from now on."""
        self.planned.discard(part)

    def held(self) -> list[tuple[str, int]]:
        """The parts that are there."""
        return [(part, num_bytes) for part, num_bytes in self.rows if part not in self.planned]

    def lines(self) -> list[str]:
        """The table as text, one line a part and a last one with the sum."""
        rows = [*self.rows, ("total", sum(size for _, size in self.rows))]
        width = max(len(part) for part, _ in rows)
        return [f"{part:<{width}}  {size / GIB:8.3f} GiB" for part, size in rows]


def allocate_cache(
    platform: Platform, groups: Sequence[CacheGroup], layouts: Sequence[KVLayout], plan: CachePlan
) -> dict[int, tuple[Tensor, Tensor]]:
    """Zeroed key and value tensors by layer, in each group's layout. Raises UsageError when a layout refuses the block
    size."""
    import torch

    caches: dict[int, tuple[Tensor, Tensor]] = {}
    for group, layout in zip(groups, layouts, strict=True):
        if layout.block_sizes and plan.block_size not in layout.block_sizes:
            accepted = ", ".join(map(str, layout.block_sizes))
            raise UsageError(f"--block-size {plan.block_size}: the attention layout {layout.name!r} accepts {accepted}")
        dtype: torch.dtype = getattr(torch, group.spec.dtype)
        key_shape, value_shape = layout.shapes(group.spec, plan.num_blocks + 1, plan.block_size)
        for layer in group.layers:
            caches[layer] = (platform.empty_kv_cache(key_shape, dtype), platform.empty_kv_cache(value_shape, dtype))
    return caches


def poison_blocks(
    group: CacheGroup, layout: KVLayout, caches: dict[int, tuple[Tensor, Tensor]], blocks: Tensor
) -> None:
    """Fills whole blocks (int64 [B]) with NaN in every layer of a group (S-54)."""
    for layer in group.layers:
        for tensor, shape in zip(caches[layer], (layout.key_shape, layout.value_shape), strict=True):
            tensor.index_fill_(shape.index("block"), blocks, float("nan"))


def copy_blocks(
    group: CacheGroup,
    layout: KVLayout,
    caches: dict[int, tuple[Tensor, Tensor]],
    sources: Tensor,
    destinations: Tensor,
) -> None:
    """Copies whole blocks (int64 [C] each) in every layer of a group. All sources are read before a destination is
    written."""
    for layer in group.layers:
        for tensor, shape in zip(caches[layer], (layout.key_shape, layout.value_shape), strict=True):
            dim = shape.index("block")
            tensor.index_copy_(dim, destinations, tensor.index_select(dim, sources))
