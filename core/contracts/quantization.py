"""Kind `quantization`: how a layer's weight is stored and multiplied. `none` is one: plain floating-point weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .kernels import LinearKernel
from .provider import BuildContext, Provider

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A layer that a method may quantize. Logical shape: [out_features, in_features].

    parts: output rows of each checkpoint tensor that is fused into this layer (qkv: three, gate_up: two, else one).
    prefix: the layer's dotted name in the checkpoint's terms ("model.layers.0.self_attn.qkv_proj").
    """

    kind: Literal["linear", "experts", "embedding", "kv"]
    prefix: str
    in_features: int
    out_features: int
    parts: tuple[int, ...]
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A tensor that the checkpoint holds for a layer.

    name: its suffix ("weight", "qweight", "scales"). shape: the packed shape of the fused tensor. part_dim: the dimension
    along which fused parts are concatenated. pack_factor: logical elements per stored one along that dimension.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    part_dim: int = 0
    pack_factor: int = 1


class LayerMethod(ABC):
    """One layer's weights under a method. Owned by the layer that created it."""

    @abstractmethod
    def params(self) -> tuple[ParamSpec, ...]:
        """The tensors to load, in fused form."""

    @abstractmethod
    def load(self, name: str, part: int, tensor: Tensor) -> None:
        """Takes the checkpoint tensor `name` of fused part number `part`. Raises ModelLoadError on a wrong shape."""

    @abstractmethod
    def finish_loading(self) -> None:
        """After the last tensor: repack for the kernel and drop what is no longer needed."""

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""

    def apply_gated(self, x: Tensor, op: str) -> Tensor | None:
        """`LinearKernel.apply_gated` of a layer without a bias. None: not done, the caller takes both steps."""
        return None

    def add_product(self, x: Tensor, residual: Tensor) -> bool:
        """`LinearKernel.add_product` of a layer without a bias. False: not done, and residual is as it was."""
        return False

    @abstractmethod
    def dequantize(self) -> Tensor:
        """The logical weight [out_features, in_features], for tests: the oracle."""


class QuantizationMethod(ABC):
    """Creates the layer methods of one model."""

    @abstractmethod
    def create(self, spec: LayerSpec) -> LayerMethod:
        """Called once a layer while the model is being built; raises ModelLoadError when the layer cannot be served so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationProvider(Provider[QuantizationMethod]):
    """detect: whether a checkpoint's config (HF form) says that it is stored so. Asked of every installed method."""

    detect: Callable[[dict[str, Any]], bool] = lambda hf_config: False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationContext(BuildContext):
    """linear: the chosen kernel for plain products. device and dtype as torch understands them."""

    linear: LinearKernel
    torch_device: str = "cpu"
    torch_dtype: Any = None
