"""The dense decoder itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hotswap.core.contracts.attention import AttentionLayer, CacheSpec
from hotswap.core.contracts.loader import ModelLoadError
from hotswap.core.contracts.model import ForwardContext, LoadReport, Model, ModelContext, WeightSpec
from hotswap.core.layers.activation import gated_activation
from hotswap.core.layers.attention import SelfAttention
from hotswap.core.layers.cache import full_cache_spec
from hotswap.core.layers.embedding import Embedding, OutputHead
from hotswap.core.layers.linear import Linear
from hotswap.core.layers.mlp import GatedMLP
from hotswap.core.layers.norm import RMSNorm
from hotswap.core.layers.rotary import RopeTables
from hotswap.core.layers.weights import WeightMap

from .blocks import Block, PostNormBlock, PreNormBlock, SandwichBlock
from .config import dense_config


class DenseDecoder(Model):
    """Embedding, decoder blocks, final norm, head. Everything that a step calls is bound at construction."""

    packed_modules = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    def __init__(self, context: ModelContext) -> None:
        config = dense_config(context.hf_config)
        self.config = config
        self._context = context
        dtype, device = context.torch_dtype, context.torch_device
        self._activation_dtype = context.activation_dtype or dtype
        self._max_len = context.max_model_len or config.max_position
        self._ropes = RopeTables(self._max_len, device)
        scale = config.embed_scale
        if config.round_embed_scale:
            scale = float(torch.tensor(scale).to(dtype))
        self._embedding = Embedding(
            "model.embed_tokens",
            config.vocab_size,
            config.hidden_size,
            scale=scale,
            dtype=dtype,
            activation_dtype=self._activation_dtype,
            device=device,
        )
        self._blocks: list[Block] = [self._block(index) for index in range(config.num_layers)]
        self._final_norm = self._norm("model.norm", config.hidden_size)
        self._head = OutputHead(
            self._embedding,
            context.quantization,
            context.ops.linear,
            "lm_head",
            tied=config.tied,
            logger=context.logger,
        )
        self._weights = WeightMap()
        self._head.register(self._weights)
        for block in self._blocks:
            block.register(self._weights)
        self._final_norm.register(self._weights)

    # Construction

    def _norm(self, name: str, size: int) -> RMSNorm:
        config, context = self.config, self._context
        return RMSNorm(
            context.ops,
            name,
            size,
            config.eps,
            wide=config.traits.norm_wide,
            one_plus=config.traits.norm_one_plus,
            dtype=context.torch_dtype,
            activation_dtype=self._activation_dtype,
            device=context.torch_device,
        )

    def _linear(self, prefix: str, in_features: int, parts: dict[str, int], bias: bool) -> Linear:
        """parts: rows of each checkpoint module, by its last name; they stand beside the fused one that `prefix`
        names."""
        parent = prefix.rpartition(".")[0]
        return Linear(
            self._context.quantization,
            prefix,
            in_features=in_features,
            sources=tuple(f"{parent}.{name}" for name in parts),
            parts=tuple(parts.values()),
            bias=bias,
            dtype=self._context.torch_dtype,
            device=self._context.torch_device,
        )

    def _block(self, index: int) -> Block:
        config, prefix = self.config, f"model.layers.{index}"
        attention, mlp = self._attention(index, f"{prefix}.self_attn"), self._mlp(f"{prefix}.mlp")

        def norm(name: str) -> RMSNorm:
            return self._norm(f"{prefix}.{name}", config.hidden_size)

        match config.traits.norm_order:
            case "pre":
                before, between = norm("input_layernorm"), norm("post_attention_layernorm")
                return PreNormBlock(before, attention, between, mlp, config.residual_scale)
            case "sandwich":
                return SandwichBlock(
                    norm("input_layernorm"),
                    attention,
                    norm("post_attention_layernorm"),
                    norm("pre_feedforward_layernorm"),
                    mlp,
                    norm("post_feedforward_layernorm"),
                )
            case "post":
                return PostNormBlock(
                    attention, norm("post_attention_layernorm"), mlp, norm("post_feedforward_layernorm")
                )

    def _attention(self, index: int, prefix: str) -> SelfAttention:
        config, head_dim = self.config, self.config.head_dim
        queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
        window, rope = config.windows[index], config.ropes[index]
        layer = AttentionLayer(
            index=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim_k=head_dim,
            head_dim_v=head_dim,
            scale=config.attention_scale,
            # A window that nothing can leave asks nothing of the attention backend.
            window=None if window is None or window >= self._max_len else window,
            soft_cap=config.attention_soft_cap,
        )
        fused = {"qkv_proj": queries + 2 * keys}
        parts = fused if config.traits.fused_checkpoint else {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        per_head = config.traits.qk_norm == "head"
        q_norm = k_norm = None
        if config.traits.qk_norm != "none":
            q_norm = self._norm(f"{prefix}.q_norm", head_dim if per_head else queries)
            k_norm = self._norm(f"{prefix}.k_norm", head_dim if per_head else keys)
        return SelfAttention(
            layer,
            self._linear(f"{prefix}.qkv_proj", config.hidden_size, parts, config.qkv_bias),
            self._linear(f"{prefix}.o_proj", queries, {"o_proj": config.hidden_size}, config.output_bias),
            None if rope is None else self._ropes.get(rope),
            q_norm,
            k_norm,
            norm_all_heads=not per_head,
        )

    def _mlp(self, prefix: str) -> GatedMLP:
        config, size = self.config, self.config.intermediate_size
        parts = {"gate_up_proj": 2 * size} if config.traits.fused_checkpoint else {"gate_proj": size, "up_proj": size}
        return GatedMLP(
            self._linear(f"{prefix}.gate_up_proj", config.hidden_size, parts, config.mlp_bias),
            self._linear(f"{prefix}.down_proj", size, {"down_proj": config.hidden_size}, config.mlp_bias),
            gated_activation(self._context.ops, config.activation),
        )

    # The contract

    def attention_layers(self) -> Sequence[AttentionLayer]:
        return [block.attention.layer for block in self._blocks]

    def cache_specs(self) -> Sequence[CacheSpec]:
        # Layers with a window keep everything too: one cache group, and the window is a mask.
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
            raise ModelLoadError("dense_decoder runs all its layers in one process; it takes no other stage's output")
        return self._hidden(embeds, positions, context, None)

    def forward_rows(self, embeds: Tensor, positions: Tensor, context: ForwardContext, rows: Tensor) -> Tensor:
        return self._hidden(embeds, positions, context, rows)

    def _hidden(self, embeds: Tensor, positions: Tensor, context: ForwardContext, rows: Tensor | None) -> Tensor:
        """[T, H]; with rows int64 [S] those alone, which is all that the last block then computes behind its attention."""
        residual = embeds.clone()  # the blocks add to it in place; `embeds` stays the caller's
        delta: Tensor | None = None
        for block in self._blocks[:-1]:
            delta, residual = block(delta, residual, positions, context)
        delta, residual = self._blocks[-1](delta, residual, positions, context, rows)
        return self._final_norm(residual) if delta is None else self._final_norm.add(delta, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden)
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        cap = self.config.logit_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap
