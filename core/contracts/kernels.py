"""Kind `kernels`: one fast implementation of one op. The torch reference of every op lives in core/layers: it is the oracle,
and the automatic choice where no kernel can run.

Ops and their signatures (T tokens, all tensors on the worker's device; "row-strided" means only the last dimensions are
contiguous). Kernels are called on the worker's device thread and must not keep their inputs.

linear          a `LinearKernel` object: packs a weight once, then multiplies.
rms_norm        (x [T, D], weight [D], eps) -> [T, D]; computed in float32, `weight` applied after the cast back to x.dtype
add_rms_norm    (x [T, D], residual [T, D], weight [D], eps) -> normed [T, D]; residual += x in place
rope            (q [T, H, D] row-strided, k [T, KVH, D] row-strided, positions int64 [T],
                cos_sin float32 [max_pos, D_rot]) -> None; rotates in place, half-rotation ("neox") pairs over the first
                D_rot dimensions; cos_sin holds cos | sin halves
silu_mul        (gate_up [T, 2 I]) -> [T, I]: silu(gate) * up
gelu_tanh_mul   (gate_up [T, 2 I]) -> [T, I]
rope_write_kv   (q [T, H, D] row-strided, k [T, KVH, D] row-strided, v [T, KVH, Dv] row-strided, positions int64 [T],
                cos_sin float32 [max_pos, D_rot] or None, keys, values: one layer's cache seen as [block, token, head, dim]
                with any strides, slot_mapping int64 [T]) -> None: `rope` of q in place, and k (rotated) and v into the
                cache at their slots; -1 writes nothing. k itself may be left as it was or rotated. cos_sin None: no
                rotation, the write alone

Those below are the runner's and the sampler's. S rows draw a token; a slot is a request's place in the persistent batch.
On a device that works asynchronously they must not wait for it.

step_inputs     (slots int32 [R], starts int32 [R + 1], num_computed int64 [slots], token_ids int32 [slots, stride],
                tables: tuple of int32 [slots, columns], one a cache group, block_size: int, input_ids int64 [T], positions
                int64 [T], seq_lens int32 [R], slot_mappings: tuple of int64 [T], block_tables: tuple of int32 [R, width]) ->
                None. Row r's tokens starts[r] .. starts[r + 1] stand at positions num_computed[slot] and on: fills
                input_ids out of token_ids, positions, seq_lens (context after this step), slot_mappings, the first `width`
                columns of each row's table, and advances num_computed. Tokens from starts[R] on are padding: id 0,
                position 0, slot -1. Slots repeat only for rows without tokens
argmax          (logits float32 [S, V]) -> (values float32 [S], ids int64 [S]): the largest logit, its lowest id; a NaN
                anywhere in a row makes its value NaN (the id is then any valid one)
penalize        (logits float32 [E, V], local int64 [P], rows int64 [P], divisors float32 [pool, V], amounts float32
                [pool, V]) -> None: logits[local] in place: l / d where l > 0, else l * d, then minus amount; d and
                amount of the pool rows `rows`
draw            (logits float32 [D, V], best float32 [D], temperature float32 [D], min_p float32 [D] or None, top_k int64
                [D], top_p float64 [D], seeds int64 [D], positions int64 [D], ordered: bool) -> int64 [D]. `best` is
                argmax's value. top_k of 2**62 and top_p of 2.0 are off; ordered False: they are off in every row. The
                noise is core/layers/sampling/noise.py's `uniform(seeds, positions)`, the draw the inverse of the
                cumulative distribution in vocabulary order; which tokens the filters keep is said in
                core/layers/sampling/draw.py. A row with NaN or infinite `best` gives any valid id
gather_logprobs (logits float32 [S, V], chosen int64 [S], count: int) -> (ids int64, log-probabilities float64, ranks
                int64), each [S, 1 + min(count, V)]: the chosen token, then the best ones, best first, equal ones by id. A
                rank is 1 + the number of strictly greater logits; log-probabilities are at least -9999, also for NaN
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .provider import BuildContext, Provider

if TYPE_CHECKING:
    from torch import Tensor

OPS = (
    "linear",
    "rms_norm",
    "add_rms_norm",
    "rope",
    "silu_mul",
    "gelu_tanh_mul",
    "rope_write_kv",
    "step_inputs",
    "argmax",
    "penalize",
    "draw",
    "gather_logprobs",
)


class PackedWeight(ABC):
    """A weight in a kernel's own form. out_features, in_features: the logical shape [N, K]."""

    out_features: int
    in_features: int

    @abstractmethod
    def unpack(self) -> Tensor:
        """The logical weight [N, K] again: the oracle for tests."""


class LinearKernel(ABC):
    """Matrix products with weights packed once."""

    @abstractmethod
    def pack(self, weight: Tensor) -> PackedWeight:
        """weight [N, K]. The caller drops its own copy afterwards."""

    @abstractmethod
    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: Any | None = None) -> Tensor:
        """x [T, K] -> [T, N] in out_dtype (default x.dtype), accumulated in float32."""

    # Fused with what follows, where a kernel does that faster for these sizes: optional.

    def apply_gated(self, x: Tensor, weight: PackedWeight, op: str) -> Tensor | None:
        """x [T, K], weight [2 I, K] -> [T, I]: `op` ("silu_mul" or "gelu_tanh_mul") of the product, which is rounded to
        x.dtype first. None: not done, the caller takes both steps."""
        return None

    def add_product(self, x: Tensor, weight: PackedWeight, residual: Tensor) -> bool:
        """Adds x [T, K] times weight [N, K] transposed to residual [T, N] in place, rounded once or twice. False: not
        done, and residual is as it was."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProvider(Provider[Any]):
    """op: one of OPS. Names are unique per op; `build` returns a LinearKernel, or a callable with the op's signature."""

    op: str


KernelFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelContext(BuildContext):
    """dtype: the activations' dtype name. op: the op asked for."""

    op: str
    dtype: str = "float32"
