"""Kind `model`: the network. Called on the worker's device thread, once a step.

A model is made of `core/layers` modules, or brings its own. It never sees requests: only flat tokens, positions and the
attention of a `ForwardContext`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .attention import AttentionLayer, CacheSpec
from .provider import BuildContext, Provider
from .quantization import QuantizationMethod

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..layers.ops import OpTable


class ForwardContext(Protocol):
    """What a step offers to the layers. Valid during one forward only."""

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor | None = None,
        cos_sin: Tensor | None = None,
    ) -> Tensor:
        """Writes this step's key/value [T, KVH, D] to the layer's cache and attends: query [T, H, D] -> [T, H, head_dim_v].

        With positions int64 [T] and cos_sin float32 [max_pos, D_rot], query and key are rotated first (the op `rope`), so
        that rotation and write can be one kernel; both may be changed in place. A model that rotates by itself leaves
        them out; a layer without positions passes cos_sin None."""
        ...


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A tensor that the model expects, in the checkpoint's own name and shape.

    optional: may be absent. redundant: says again what another tensor says (a tied head); made-up weights leave it out.
    """

    name: str
    shape: tuple[int, ...]
    optional: bool = False
    redundant: bool = False


@dataclass(slots=True)
class LoadReport:
    """What a load found. missing: expected but absent. unexpected: present but unused."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


class Model(ABC):
    """The contract. T tokens in the flat batch, H hidden size, V logits width."""

    packed_modules: dict[
        str, tuple[str, ...]
    ] = {}  # fused module -> its parts in the checkpoint ("qkv_proj": ("q_proj", ...))
    chunkable: bool = True  # False for bidirectional encoders: a prompt must then be computed in one step
    # Whether `embed`, `forward` and `logits` may be recorded once and replayed: what they ask of the device follows from the
    # shapes of their inputs alone, they look at no value on the host (`item`, `nonzero`, a condition), and nothing that they
    # make outlives the call. Read once the weights are loaded; may be a property.
    supports_graphs: bool = True

    @abstractmethod
    def cache_specs(self) -> Sequence[CacheSpec]:
        """One per attention layer, in layer order."""

    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The constants of each attention layer, in layer order: what an attention backend will be asked for (window, soft
        cap). Empty when the model does not say."""
        return ()

    @abstractmethod
    def weight_specs(self) -> Iterator[WeightSpec]:
        """Every tensor that the checkpoint is expected to hold: for checking a load and for dummy weights."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        """Takes all tensors, then gets ready to run. Tensors may be views of a mapped file: copy what is kept."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]."""

    @abstractmethod
    def forward(
        self, embeds: Tensor, positions: Tensor, context: ForwardContext, intermediates: dict[str, Tensor] | None = None
    ) -> Tensor:
        """embeds [T, H], positions int64 [T] -> hidden [T, H] after the final norm. `intermediates`: another pipeline stage's
        output to go on from."""

    def forward_rows(self, embeds: Tensor, positions: Tensor, context: ForwardContext, rows: Tensor) -> Tensor:
        """As `forward`, but hidden [S, H] of the tokens `rows` int64 [S] alone: those that draw, or none but a padding one. A
        model may leave out what only the others need, all that comes after the last layer's attention."""
        return self.forward(embeds, positions, context).index_select(0, rows)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Chosen hidden rows [S, H] -> float32 [S, V]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProvider(Provider[Model]):
    """architectures: names out of config.json's `architectures` that this provider serves natively.

    fallback: serves any architecture that no other provider names; at most one such provider wins, by priority.
    """

    architectures: tuple[str, ...] = ()
    fallback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext(BuildContext):
    """What a model is built from.

    hf_config: config.json's content. ops: the chosen kernels. model_path: the local checkpoint (for code in the fallback).
    torch_dtype: of weights and KV cache. activation_dtype: of what flows between layers, which kernels were chosen for; None
    means torch_dtype. A model that cannot separate the two may compute in torch_dtype throughout.
    """

    hf_config: dict[str, Any]
    ops: OpTable
    quantization: QuantizationMethod
    torch_dtype: torch.dtype
    activation_dtype: torch.dtype | None = None
    torch_device: str = "cpu"
    max_model_len: int = 0
    model_path: str = ""
