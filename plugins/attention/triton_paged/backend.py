"""The backend over this folder's kernels: which of them a step needs, and with what shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from hotswap.core.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    BatchGeometry,
    Capabilities,
    KVLayout,
    LayerCache,
)
from hotswap.core.contracts.provider import DeviceInfo

from ..token_major import OncePerPass
from .decode_kernel import decode_kernel, merge_kernel
from .prefill_kernel import TILE_COLUMNS, list_tiles_kernel, prefill_kernel
from .tuning import (
    Packing,
    Shape,
    Sizes,
    decode_packing,
    decode_shape,
    decode_tokens,
    family_of,
    pack,
    padded,
    prefill_shape,
    split_plan,
)
from .write_kernel import write_kernel

_DIMENSIONS = ("block", "token", "head", "dim")
_LOG2E = math.log2(math.e)
_FEWEST_SPLITS = 8  # that a merge has room for, so that fewer of them need no other code
_SMALLEST_SEARCH = (
    256  # requests that the list of tiles is made from, so that batches of other sizes need no other code
)
_INTERPRETED_SMS = 132


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What is fixed for a layer: the launches' shapes and the arguments that both kernels share.

    max_tokens: new tokens up to which a request is decoded; 0: all is prefill.
    """

    prefill: Shape
    prefill_packing: Packing
    decode: Shape
    decode_packing: Packing
    max_tokens: int
    shared: dict[str, Any]


class TritonPagedAttention(AttentionBackend):
    """device: what the shapes are chosen for. deterministic: one kernel and no splits, so that a row's bits depend on its
    own context alone. prefill, decode, splits: instead of the table's choice, for benchmarks; splits is (splits, fewest tiles
    of one)."""

    layout = KVLayout("token_major", _DIMENSIONS, _DIMENSIONS, ())
    capabilities = Capabilities(
        dtypes=("bfloat16", "float16", "float32"),
        window=True,
        soft_cap=True,
        sinks=True,
        alibi=True,
        non_causal=True,
        fp8_cache=True,
        graph_capture="any",
    )

    def __init__(
        self,
        device: DeviceInfo,
        *,
        deterministic: bool = False,
        prefill: Shape | None = None,
        decode: Shape | None = None,
        splits: tuple[int, int] | None = None,
    ) -> None:
        self._interprets = bool(triton.knobs.runtime.interpret)
        self._family = family_of(device.kind, device.capability)
        self._deterministic = deterministic
        self._prefill, self._decode, self._splits = prefill, decode, splits
        # Programmatic dependent launch; other back ends than CUDA's do not know the option.
        self._pdl = device.kind == "cuda" and device.capability >= (9, 0) and not self._interprets
        self._launch = {"launch_pdl": True} if self._pdl else {}
        self._geometry: BatchGeometry | None = None
        self._plans: dict[tuple[Any, ...], LayerPlan] = {}
        self._tiles: OncePerPass[Tensor] = OncePerPass()

    def prepare(self, geometry: BatchGeometry) -> None:
        self._geometry = geometry
        self._tiles.clear()

    def _step(self) -> BatchGeometry:
        if self._geometry is None:
            raise RuntimeError("prepare() must come before the first layer of a step")
        return self._geometry

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache) -> None:
        step = self._step()
        tokens, heads, dim_k = key.shape
        dim_v = value.shape[2]
        write_kernel[(min(tokens, step.slot_mapping.shape[0]),)](
            key,
            value,
            *cache,
            step.slot_mapping,
            KV_HEADS=heads,
            DIM_K=dim_k,
            DIM_V=dim_v,
            BLOCK_K=padded(heads * dim_k),
            BLOCK_V=padded(heads * dim_v),
            KEY_SOURCE=key.stride(0),
            VALUE_SOURCE=value.stride(0),
            PDL=self._pdl,
            num_warps=4,
            **_cache_strides(cache),
            **self._launch,
        )

    def forward(self, query: Tensor, cache: LayerCache, layer: AttentionLayer) -> Tensor:
        step = self._step()
        out = torch.empty((query.shape[0], layer.num_heads, layer.head_dim_v), dtype=query.dtype, device=query.device)
        plan = self._plan(query, cache, layer, causal=step.causal)
        scale = layer.scale * _LOG2E if layer.soft_cap is None else layer.scale / layer.soft_cap
        scales = (scale, (layer.soft_cap or 0.0) * _LOG2E)
        if plan.max_tokens:
            self._run_decode(out, query, cache, layer, plan, scales)
        if step.max_query_len > plan.max_tokens:
            self._run_prefill(out, query, cache, layer, plan, scales)
        return out

    def _run_decode(
        self,
        out: Tensor,
        query: Tensor,
        cache: LayerCache,
        layer: AttentionLayer,
        plan: LayerPlan,
        scales: tuple[float, float],
    ) -> None:
        step, shape, packing = self._step(), plan.decode, plan.decode_packing
        token_parts = -(-min(step.max_query_len, plan.max_tokens) // packing.tokens)
        columns = layer.num_kv_heads * packing.parts
        max_tiles = -(-step.max_seq_len // shape.block_n)
        splits, min_tiles = self._splits or split_plan(
            columns * step.num_requests * token_parts, _multiprocessors(query.device), max_tiles
        )
        row_tokens = 1 if step.max_query_len == 1 else packing.tokens * token_parts
        partial_rows = step.num_requests * row_tokens
        partial = stats = None
        if splits > 1:
            sums = (splits, partial_rows, layer.num_heads)
            partial = torch.empty((*sums, layer.head_dim_v), dtype=torch.float32, device=query.device)
            stats = torch.empty((*sums, 2), dtype=torch.float32, device=query.device)
        decode_kernel[(columns, step.num_requests, splits * token_parts)](
            out,
            partial,
            stats,
            query,
            *cache,
            step.query_start_loc,
            step.seq_lens,
            step.block_table,
            layer.sinks,
            layer.alibi_slopes,
            step.block_table.stride(0),
            splits,
            min_tiles,
            partial_rows,
            *scales,
            HEADS=packing.heads,
            HEAD_PARTS=packing.parts,
            TOKENS=packing.tokens,
            TOKEN_PARTS=token_parts,
            MAX_TOKENS=plan.max_tokens,
            ROW_TOKENS=row_tokens,
            BLOCK_M=shape.rows,
            BLOCK_N=shape.block_n,
            SPLIT=splits > 1,
            num_warps=shape.warps,
            num_stages=shape.stages,
            **plan.shared,
        )
        if partial is not None:
            merge_kernel[(layer.num_heads, partial_rows)](
                out,
                partial,
                stats,
                step.query_start_loc,
                step.seq_lens,
                splits,
                min_tiles,
                partial_rows,
                NUM_HEADS=layer.num_heads,
                ROW_TOKENS=row_tokens,
                MAX_TOKENS=plan.max_tokens,
                MAX_SPLITS=max(_FEWEST_SPLITS, 1 << (splits - 1).bit_length()),
                BLOCK_N=shape.block_n,
                BLOCK_DV=padded(layer.head_dim_v),
                DIM_V=layer.head_dim_v,
                WINDOW=layer.window or 0,
                PDL=self._pdl,
                num_warps=4,
                **self._launch,
            )

    def _run_prefill(
        self,
        out: Tensor,
        query: Tensor,
        cache: LayerCache,
        layer: AttentionLayer,
        plan: LayerPlan,
        scales: tuple[float, float],
    ) -> None:
        step, shape, packing = self._step(), plan.prefill, plan.prefill_packing
        variant = (packing.tokens, plan.max_tokens)
        tiles = self._tiles.get(layer.index, variant, lambda: self._list_tiles(query.shape[0], *variant))
        prefill_kernel[(layer.num_kv_heads * packing.parts, len(tiles))](
            out,
            query,
            *cache,
            tiles,
            step.block_table,
            layer.sinks,
            layer.alibi_slopes,
            step.block_table.stride(0),
            *scales,
            HEADS=packing.heads,
            HEAD_PARTS=packing.parts,
            TOKENS=packing.tokens,
            BLOCK_M=shape.rows,
            BLOCK_N=shape.block_n,
            num_warps=shape.warps,
            num_stages=shape.stages,
            **plan.shared,
        )

    def _list_tiles(self, num_tokens: int, tile_tokens: int, max_decode_tokens: int) -> Tensor:
        """int32 [at least the step's tiles of so many tokens, TILE_COLUMNS]."""
        step = self._step()
        # Each request's last tile may be short; only so many requests have enough tokens to be here.
        requests = min(step.num_requests, num_tokens // (max_decode_tokens + 1))
        count = num_tokens // tile_tokens + requests
        tiles = torch.empty((count, TILE_COLUMNS.value), dtype=torch.int32, device=step.seq_lens.device)
        list_tiles_kernel[(count,)](
            tiles,
            step.query_start_loc,
            step.seq_lens,
            step.num_requests,
            TOKENS=tile_tokens,
            MIN_TOKENS=max_decode_tokens + 1,
            MAX_REQUESTS=max(_SMALLEST_SEARCH, 1 << (step.num_requests - 1).bit_length()),
            PDL=self._pdl,
            num_warps=4,
            **self._launch,
        )
        return tiles

    def _plan(self, query: Tensor, cache: LayerCache, layer: AttentionLayer, *, causal: bool) -> LayerPlan:
        """Made at a layer's first step. Layers that differ in nothing but their index and their tensors share one."""
        sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v)
        flags = (layer.window, layer.soft_cap is None, layer.sinks is None, layer.alibi_slopes is None, causal)
        key = (*sizes, *flags, query.dtype, query.stride(), cache[0].stride(), cache[1].stride(), cache[0].dtype)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(query, cache, layer, causal=causal)
        return plan

    def _make_plan(self, query: Tensor, cache: LayerCache, layer: AttentionLayer, *, causal: bool) -> LayerPlan:
        dims = padded(layer.head_dim_k), padded(layer.head_dim_v)
        sizes = Sizes(self._family, *dims, query.element_size(), cache[0].element_size())
        group = layer.num_heads // layer.num_kv_heads
        prefill = self._prefill or prefill_shape(sizes, deterministic=self._deterministic)
        rows, decode_pack = decode_packing(group)
        shared: dict[str, Any] = {
            "NUM_HEADS": layer.num_heads,
            "GROUP": group,
            "BLOCK_DK": dims[0],
            "BLOCK_DV": dims[1],
            "DIM_K": layer.head_dim_k,
            "DIM_V": layer.head_dim_v,
            "QUERY_TOKEN": query.stride(0),
            "QUERY_HEAD": query.stride(1),
            "CAUSAL": causal,
            "WINDOW": layer.window or 0,
            "SOFT_CAP": layer.soft_cap is not None,
            "SINKS": layer.sinks is not None,
            "ALIBI": layer.alibi_slopes is not None,
            "UPCAST": self._interprets,
            "PDL": self._pdl,
            **_cache_strides(cache),
            **self._launch,
        }
        return LayerPlan(
            prefill=prefill,
            prefill_packing=pack(group, prefill.rows),
            decode=self._decode or decode_shape(sizes, rows),
            decode_packing=decode_pack,
            max_tokens=0 if self._deterministic else decode_tokens(decode_pack),
            shared=shared,
        )


def _cache_strides(cache: LayerCache) -> dict[str, int]:
    """Compile-time constants: they are the same in all layers and steps."""
    key, value = cache
    names = ("BLOCK", "TOKEN", "HEAD")
    return {
        "PAGE": key.shape[1],
        **{f"KEY_{name}": key.stride(at) for at, name in enumerate(names)},
        **{f"VALUE_{name}": value.stride(at) for at, name in enumerate(names)},
    }


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    """Of a device; a large card's number under the interpreter, so that contexts are split there as they are on one."""
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
