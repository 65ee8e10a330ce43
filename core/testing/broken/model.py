"""Models with one fault each: variants of the Llama of templates/model.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...contracts.attention import CacheSpec
from ...contracts.model import ForwardContext, LoadReport, Model, ModelContext, ModelProvider
from ...errors import ModelLoadError
from ..templates.model import MyModel
from . import BrokenSample


class CountsPositionsFromZero(MyModel):
    """Takes the place in the batch for the position: right for one prompt in one step, and nothing else."""

    def forward(
        self, embeds: Tensor, positions: Tensor, context: ForwardContext, intermediates: dict[str, Tensor] | None = None
    ) -> Tensor:
        return super().forward(embeds, torch.arange(len(embeds)), context, intermediates)


class ScalesScoresTwice(MyModel):
    """Asks for attention with the wrong scale."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        for layer in self._layers:
            layer.attention.layer = replace(layer.attention.layer, scale=layer.attention.layer.scale**2)


class DropsTheLastToken(MyModel):
    """Logits for one token too few."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden)[:, :-1]


class RoundsLogits(MyModel):
    """Logits in the weights' dtype."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden).to(hidden.dtype)


class KeepsTheLoadersMemory(MyModel):
    """The final norm's weight is a view of the file."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        kept = dict(weights)
        report = super().load_weights(kept.items())
        self._norm.weight = kept["model.norm.weight"]
        return report


class SwallowsWhatIsMissing(MyModel):
    """Runs with whatever was in memory where a tensor did not come."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        try:
            return super().load_weights(weights)
        except ModelLoadError:
            return LoadReport()


class ForgetsTheLastNorm(MyModel):
    """Loads the final norm and does not apply its weight."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        report = super().load_weights(weights)
        self._norm.weight.fill_(1.0)
        return report


class AddsInPlace(MyModel):
    """Writes into the embeds, which are the caller's."""

    def forward(
        self, embeds: Tensor, positions: Tensor, context: ForwardContext, intermediates: dict[str, Tensor] | None = None
    ) -> Tensor:
        return embeds.copy_(super().forward(embeds, positions, context, intermediates)).clone()


class LooksAtItsResult(MyModel):
    """A condition on values: recorded as it was once, and a wait in every step."""

    def forward(
        self, embeds: Tensor, positions: Tensor, context: ForwardContext, intermediates: dict[str, Tensor] | None = None
    ) -> Tensor:
        hidden = super().forward(embeds, positions, context, intermediates)
        if bool(hidden.isnan().any()):
            raise FloatingPointError("the hidden states are not numbers")
        return hidden


class GivesTheFirstRows(MyModel):
    """As many hidden states as were asked for, but not those."""

    def forward_rows(self, embeds: Tensor, positions: Tensor, context: ForwardContext, rows: Tensor) -> Tensor:
        return self.forward(embeds, positions, context)[: len(rows)]


class CachesAllHeads(MyModel):
    """A cache spec with room for every query head, although fewer KV heads are kept."""

    def cache_specs(self) -> Sequence[CacheSpec]:
        return [replace(spec, num_kv_heads=self._heads) for spec in super().cache_specs()]


def _sample(name: str, model: type[Model], caught_by: str) -> BrokenSample:
    provider = ModelProvider(
        name=name,
        build=model,
        architectures=("LlamaForCausalLM",),
        summary=f"broken: {name}",
    )
    return BrokenSample(name, provider, caught_by)


BROKEN: tuple[BrokenSample, ...] = (
    _sample("counts_positions_from_zero", CountsPositionsFromZero, "chunked_prompt_equals_transformers"),
    _sample("scales_scores_twice", ScalesScoresTwice, "whole_prompt_equals_transformers"),
    _sample("drops_the_last_token", DropsTheLastToken, "logits_are_float32_and_as_wide_as_the_oracle"),
    _sample("rounds_logits", RoundsLogits, "logits_are_float32_and_as_wide_as_the_oracle"),
    _sample("keeps_the_loaders_memory", KeepsTheLoadersMemory, "nothing_of_the_loaders_memory_is_kept"),
    _sample("swallows_what_is_missing", SwallowsWhatIsMissing, "missing_and_unknown_tensors_are_noticed"),
    _sample("forgets_the_last_norm", ForgetsTheLastNorm, "every_tensor_is_used"),
    _sample("adds_in_place", AddsInPlace, "attention_is_asked_for_in_layer_order"),
    _sample("caches_all_heads", CachesAllHeads, "cache_specs_agree_with_the_layers"),
    _sample("gives_the_first_rows", GivesTheFirstRows, "mixed_batches_continue_as_transformers_would"),
    _sample("looks_at_its_result", LooksAtItsResult, "what_may_be_recorded_looks_at_no_value"),
)
