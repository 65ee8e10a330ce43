"""Model `my_model`: a small Llama out of the engine's own layers, which take care of fusion, kernels and quantization."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from hotswap.core.contracts import (
    AttentionLayer,
    CacheSpec,
    ForwardContext,
    LoadReport,
    Model,
    ModelContext,
    ModelLoadError,
    ModelProvider,
    WeightSpec,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hotswap.core.layers.attention import SelfAttention
    from hotswap.core.layers.linear import Linear
    from hotswap.core.layers.mlp import GatedMLP
    from hotswap.core.layers.norm import RMSNorm


class MyModel(Model):
    packed_modules = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    def __init__(self, context: ModelContext) -> None:
        from hotswap.core.layers.embedding import Embedding, OutputHead  # here: these import torch
        from hotswap.core.layers.rotary import RopeTables, rope_config
        from hotswap.core.layers.weights import WeightMap

        self._context = context
        self._config = config = context.hf_config
        self._hidden: int = config["hidden_size"]
        self._heads: int = config["num_attention_heads"]
        self._head_dim: int = config.get("head_dim") or self._hidden // self._heads
        dtype, device = context.torch_dtype, context.torch_device
        tables = RopeTables(context.max_model_len or config["max_position_embeddings"], device)
        self._cos_sin = tables.get(rope_config(config, self._head_dim))
        name = "model.embed_tokens"
        activations = context.activation_dtype
        self._embedding = Embedding(
            name, config["vocab_size"], self._hidden, dtype=dtype, activation_dtype=activations, device=device
        )
        tied = bool(config.get("tie_word_embeddings"))
        quantization, linear = context.quantization, context.ops.linear
        self._head = OutputHead(self._embedding, quantization, linear, "lm_head", tied=tied, logger=context.logger)
        self._layers = [MyModelLayer(self, index) for index in range(config["num_hidden_layers"])]
        self._norm = self.norm("model.norm")
        self._weights = WeightMap()
        parts = [part for layer in self._layers for part in layer.parts]
        for part in (self._head, *parts, self._norm):
            part.register(self._weights)

    def norm(self, name: str) -> RMSNorm:
        from hotswap.core.layers.norm import RMSNorm

        context = self._context
        eps: float = self._config["rms_norm_eps"]
        return RMSNorm(context.ops, name, self._hidden, eps, dtype=context.torch_dtype, device=context.torch_device)

    def linear(self, prefix: str, in_features: int, parts: dict[str, int]) -> Linear:
        """prefix: the fused layer's name; parts: output rows of each checkpoint module beside it, by last name."""
        from hotswap.core.layers.linear import Linear

        parent, context = prefix.rpartition(".")[0], self._context
        return Linear(
            context.quantization,
            prefix,
            in_features=in_features,
            sources=tuple(f"{parent}.{name}" for name in parts),
            parts=tuple(parts.values()),
            dtype=context.torch_dtype,
            device=context.torch_device,
        )

    def attention(self, index: int, prefix: str) -> SelfAttention:
        from hotswap.core.layers.attention import SelfAttention

        dim, kv_heads = self._head_dim, self._config["num_key_value_heads"]
        layer = AttentionLayer(index, self._heads, kv_heads, dim, dim, scale=dim**-0.5)
        rows = {"q_proj": self._heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        qkv = self.linear(f"{prefix}.qkv_proj", self._hidden, rows)
        output = self.linear(f"{prefix}.o_proj", self._heads * dim, {"o_proj": self._hidden})
        return SelfAttention(layer, qkv, output, self._cos_sin)

    def mlp(self, prefix: str) -> GatedMLP:
        from hotswap.core.layers.activation import gated_activation
        from hotswap.core.layers.mlp import GatedMLP

        size = self._config["intermediate_size"]
        return GatedMLP(
            self.linear(f"{prefix}.gate_up_proj", self._hidden, {"gate_proj": size, "up_proj": size}),
            self.linear(f"{prefix}.down_proj", size, {"down_proj": self._hidden}),
            gated_activation(self._context.ops, self._config["hidden_act"]),
        )

    # What the engine calls

    def attention_layers(self) -> Sequence[AttentionLayer]:
        return [layer.attention.layer for layer in self._layers]

    def cache_specs(self) -> Sequence[CacheSpec]:
        from hotswap.core.layers.cache import full_cache_spec

        return [full_cache_spec(layer, self._context) for layer in self.attention_layers()]

    def weight_specs(self) -> Iterator[WeightSpec]:
        return self._weights.specs()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        report = self._weights.load(weights)
        self._head.finish()
        return report

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding(token_ids)

    def forward(
        self, embeds: Tensor, positions: Tensor, context: ForwardContext, intermediates: dict[str, Tensor] | None = None
    ) -> Tensor:
        if intermediates is not None:
            raise ModelLoadError("my_model runs all its layers in one process; it takes no other stage's output")
        residual = embeds.clone()  # `embeds` stays the caller's
        for layer in self._layers:
            residual = layer(residual, positions, context)
        return self._norm(residual)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


class MyModelLayer:
    """One decoder layer: norm, attention, add, norm, MLP, add."""

    def __init__(self, model: MyModel, index: int) -> None:
        prefix = f"model.layers.{index}"
        self.attention = model.attention(index, f"{prefix}.self_attn")
        self._mlp = model.mlp(f"{prefix}.mlp")
        self._norms = model.norm(f"{prefix}.input_layernorm"), model.norm(f"{prefix}.post_attention_layernorm")
        self.parts = (self.attention, self._mlp, *self._norms)

    def __call__(self, residual: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        before, between = self._norms
        residual = residual + self.attention(before(residual), positions, context)
        return residual + self._mlp(between(residual))


@hookimpl
def hotswap_model() -> Iterator[ModelProvider]:
    yield ModelProvider(
        name="my_model",
        build=MyModel,
        architectures=("LlamaForCausalLM",),
        summary="Llama, as an example of a model family.",
    )
