"""How transformers' attention calls reach the engine.
 One function is registered with transformers under ROUTED. It hands each call to the `hotswap_attention` attribute of
the calling module: a `Probe` while the model is examined, a `RoutedLayer` while it serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from hotswap.core.contracts.attention import AttentionLayer
from hotswap.core.contracts.loader import ModelLoadError
from hotswap.core.contracts.model import ForwardContext

ROUTED = "hotswap"

# Keyword arguments of an attention call that change nothing here: bookkeeping, and what `Probe` reads by name.
_KNOWN_ARGUMENTS = {
    "cache_position",
    "dropout",
    "is_causal",
    "layer_idx",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "scaling",
    "sliding_window",
    "softcap",
    "use_cache",
}


def _routed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    """query [1, H, T, D], key and value [1, KVH, T, D] -> ([1, T, H, Dv], None), as transformers' attention functions
    do."""
    return module.hotswap_attention(module, query, key, value, attention_mask, kwargs), None


def register() -> None:
    """Makes ROUTED known to transformers as an attention implementation that wants no mask."""
    AttentionInterface.register(ROUTED, _routed_attention)


class Steps:
    """Who answers attention calls at the moment. Shared by a model's routed layers; set around each forward."""

    __slots__ = ("context",)

    def __init__(self) -> None:
        self.context: ForwardContext | None = None

    @contextmanager
    def within(self, context: ForwardContext) -> Iterator[None]:
        self.context = context
        try:
            yield
        finally:
            self.context = None


class RoutedLayer:
    """One attention module's way to the paged cache."""

    __slots__ = ("_layer", "_steps")

    def __init__(self, layer: AttentionLayer, steps: Steps) -> None:
        self._layer = layer
        self._steps = steps

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        context = self._steps.context
        if context is None:
            raise ModelLoadError("a routed attention layer was called outside a forward")
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        return context.attend(self._layer, q, k, v).unsqueeze(0)


class Probe:
    """Records what each attention call asks for, and every reason why it cannot be served exactly."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.modules: list[nn.Module] = []
        self.layers: list[AttentionLayer] = []
        self.problems: list[str] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        self._check(module, query, key, mask, kwargs)
        scale, window = kwargs.get("scaling"), kwargs.get("sliding_window")
        self.modules.append(module)
        self.layers.append(
            AttentionLayer(
                index=len(self.layers),
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim_k=key.shape[3],
                head_dim_v=value.shape[3],
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                window=None if window is None or window >= self._max_model_len else int(window),
                soft_cap=kwargs.get("softcap"),
            )
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _check(self, module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> None:
        if any(module is seen for seen in self.modules):
            self.problems.append("an attention module is used twice in one forward")
        if query.shape[0] != 1 or query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
            self.problems.append(
                f"attention over other tokens than the step's own (query {list(query.shape)}, key {list(key.shape)})"
            )
        if mask is not None:
            self.problems.append("the model adds a mask or bias of its own to the attention scores")
        if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            self.problems.append("attention that is not causal")
        for name, value in kwargs.items():
            if name not in _KNOWN_ARGUMENTS and value is not None:
                self.problems.append(f"its attention needs {name!r}")
