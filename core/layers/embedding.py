"""The token embedding and the output head, which may share one matrix."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contracts.kernels import LinearKernel
from ..contracts.model import WeightSpec
from ..contracts.quantization import QuantizationMethod
from ..errors import ModelLoadError
from .linear import Linear
from .weights import WeightMap, WeightTarget, check_float


class Embedding:
    """int64 [T] -> [T, H] in the activations' dtype, multiplied by `scale`. Ids must lie within the vocabulary."""

    __slots__ = ("_activation_dtype", "_loaded", "_scale", "name", "table")

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float = 1.0,
        dtype: torch.dtype,
        activation_dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.name = f"{name}.weight"
        self.table = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self._activation_dtype = activation_dtype or dtype
        self._scale = None if scale == 1.0 else scale
        self._loaded = False

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = F.embedding(token_ids, self.table).to(self._activation_dtype)
        return rows if self._scale is None else rows.mul_(self._scale)

    @property
    def loaded(self) -> bool:
        return self._loaded

    def load(self, tensor: Tensor) -> None:
        check_float(self.name, tensor)
        self.table.copy_(tensor)
        self._loaded = True

    def register(self, weights: WeightMap, *, optional: bool = False) -> None:
        weights.add([WeightTarget(WeightSpec(self.name, tuple(self.table.shape), optional), self.load)])


class OutputHead:
    """hidden [S, H] -> float32 logits [S, V].

    `finish` must be called after the load. A tied head multiplies by the embedding's matrix; when the checkpoint
    holds a head all the same, an equal one is dropped and a different one is used, because it was trained. When only
    the head is there, the embedding takes its values.
    """

    def __init__(
        self,
        embedding: Embedding,
        quantization: QuantizationMethod,
        linear: LinearKernel,
        name: str,
        *,
        tied: bool,
        logger: logging.Logger,
    ) -> None:
        self._embedding = embedding
        self._linear_kernel = linear
        self._name = name
        self._logger = logger
        self._found: Tensor | None = None  # a tied model's own head, until finish() has compared it
        self._apply: Callable[..., Tensor] = _not_loaded
        self._untied: Linear | None = None
        if not tied:
            vocab_size, hidden_size = embedding.table.shape
            self._untied = Linear(
                quantization,
                name,
                in_features=hidden_size,
                sources=(name,),
                parts=(vocab_size,),
                dtype=embedding.table.dtype,
                device=embedding.table.device,
            )

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._apply(hidden, None, torch.float32)

    def register(self, weights: WeightMap) -> None:
        self._embedding.register(weights, optional=self._untied is None)
        if self._untied is not None:
            self._untied.register(weights)
        else:
            shape = tuple(self._embedding.table.shape)
            weights.add(
                [WeightTarget(WeightSpec(f"{self._name}.weight", shape, optional=True, redundant=True), self._keep)]
            )

    def _keep(self, tensor: Tensor) -> None:
        check_float(f"{self._name}.weight", tensor)
        table = self._embedding.table
        self._found = tensor.to(device=table.device, dtype=table.dtype, copy=True)

    def finish(self) -> None:
        """After the last tensor. Raises ModelLoadError when neither embedding nor head came."""
        if self._untied is not None:
            self._apply = self._untied.method.apply
            return
        matrix = self._choose_matrix()
        self._found = None
        packed, kernel = self._linear_kernel.pack(matrix), self._linear_kernel

        def apply(x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
            return kernel.apply(x, packed, bias, out_dtype)

        self._apply = apply

    def _choose_matrix(self) -> Tensor:
        embedding, found = self._embedding, self._found
        if not embedding.loaded:
            if found is None:
                raise ModelLoadError(f"the checkpoint lacks 1 tensor(s) that the config asks for: {embedding.name}")
            embedding.load(found)
        elif found is not None and not torch.equal(found, embedding.table):
            self._logger.warning(
                "config.json ties the output head to the embedding, but the file holds another %s.weight: using that",
                self._name,
            )
            return found
        return embedding.table


def _not_loaded(x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    raise ModelLoadError("the output head was used before its weights were loaded")
