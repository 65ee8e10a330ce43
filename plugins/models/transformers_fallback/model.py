"""The fallback model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from hotswap.core.contracts.attention import AttentionLayer, CacheSpec
from hotswap.core.contracts.loader import ModelLoadError
from hotswap.core.contracts.model import ForwardContext, LoadReport, Model, ModelContext, WeightSpec
from hotswap.core.layers.cache import full_cache_spec

from .examine import Examined, decoder_of, examine, pin_rope, refusal, run_decoder
from .routing import ROUTED, RoutedLayer, Steps
from .selfcheck import disagreement, leak, routed_logits, sample_tokens


class TransformersModel(Model):
    """transformers' own modules with routed attention. Rotations, norms, experts and heads are theirs, unchanged.

    The whole model (decoder and head) is kept as transformers built it. Its decoder runs on its own in `forward`; in
    `logits` the whole model runs with a decoder that hands its input through, so that whatever the head does to its
    logits is done.
    """

    # Which of transformers' models can be recorded is not known, and differs from version to version: experts may be chosen in
    # a loop over what a router said, and conditions on tensors may stand anywhere. A recording that succeeds would not prove
    # that nothing was chosen by values that Python knows: it would be replayed for others.
    supports_graphs = False

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        text = context.hf_config.get("text_config") or context.hf_config
        self._max_len = context.max_model_len or int(
            text.get("max_position_embeddings") or text.get("n_positions") or 2048
        )
        trust = context.config.model.trust_remote_code
        self._examined: Examined = examine(context.hf_config, self._max_len, context.model_path, trust)
        self._steps = Steps()
        self._model: Any = None  # these three are set by load_weights
        self._embedding: Any = None
        self._decode: Any = None

    def attention_layers(self) -> Sequence[AttentionLayer]:
        return self._examined.layers

    def cache_specs(self) -> Sequence[CacheSpec]:
        # Layers with a window keep everything too: one cache group, and the window is a mask.
        return [full_cache_spec(layer, self._context) for layer in self._examined.layers]

    def weight_specs(self) -> Iterator[WeightSpec]:
        return iter(self._examined.weights)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        """transformers places the tensors itself: it knows renamed, stacked and tied ones. Then the self-check."""
        given: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name in given:
                raise ModelLoadError(f"the checkpoint holds the tensor {name} twice")
            given[name] = tensor
        model, report = self._instantiate(given)
        _own_storage(model, given)
        given.clear()  # what the loader put on the device must not stay there beside the model's own
        model = model.to(self._context.torch_device).eval().requires_grad_(False)
        pin_rope(model, self._max_len)
        modules = dict(model.named_modules())
        for name, layer in zip(self._examined.module_names, self._examined.layers, strict=True):
            modules[name].hotswap_attention = RoutedLayer(layer, self._steps)
        self._model = model
        self._embedding = model.get_input_embeddings()
        self._decode = decoder_of(model)
        self._own_forward = self._decode.forward
        with torch.inference_mode():
            self._self_check()
        return report

    def _instantiate(self, given: dict[str, Tensor]) -> tuple[Any, LoadReport]:
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # what it would say of missing and unused tensors, we say
        transformers.logging.disable_progress_bar()
        try:
            model, info = self._examined.model_class.from_pretrained(
                None,
                config=self._examined.config,
                state_dict=given,
                dtype=self._context.torch_dtype,
                attn_implementation=ROUTED,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported below, by name
                local_files_only=True,
            )
        except Exception as error:  # whatever transformers finds wrong with the tensors
            raise ModelLoadError(
                f"transformers could not load the checkpoint: {type(error).__name__}: {error}"
            ) from error
        finally:
            transformers.logging.enable_progress_bar()
            transformers.logging.set_verbosity(verbosity)
        report = LoadReport(missing=sorted(info["missing_keys"]), unexpected=sorted(info["unexpected_keys"]))
        problems = [
            f"tensor {name} has the shape {list(found)}; the config asks for {list(wanted)}"
            for name, found, wanted in sorted(info["mismatched_keys"])
        ]
        if report.missing:
            shown = ", ".join(report.missing[:8])
            problems.append(f"the checkpoint lacks {len(report.missing)} tensor(s) that the config asks for: {shown}")
        problems.extend(str(message) for message in info["error_msgs"])
        if problems:
            raise ModelLoadError("; ".join(problems))
        return model, report

    def embed(self, token_ids: Tensor) -> Tensor:
        embeds: Tensor = self._embedding(token_ids.unsqueeze(0))[0]
        return embeds

    def forward(
        self, embeds: Tensor, positions: Tensor, context: ForwardContext, intermediates: dict[str, Tensor] | None = None
    ) -> Tensor:
        if intermediates is not None:
            raise ModelLoadError(
                "the transformers fallback runs all its layers in one process; it takes no other stage's output"
            )
        with self._steps.within(context):
            hidden: Tensor = run_decoder(self._decode, embeds.unsqueeze(0), positions.unsqueeze(0)).last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self._decode.forward = self._hand_through
        try:
            logits: Tensor = self._model(inputs_embeds=hidden.unsqueeze(0), use_cache=False, return_dict=True).logits[0]
        finally:
            self._decode.forward = self._own_forward
        return logits.float()

    def _hand_through(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        return self._examined.output_class(last_hidden_state=inputs_embeds)

    def _self_check(self) -> None:
        """Raises ModelLoadError when sequences reach each other, or logits are not those of transformers' own
        forward."""
        model_class, device, dtype = self._examined.model_class, self._context.torch_device, self._context.torch_dtype
        vocab_size = self._embedding.weight.shape[0]
        experts = any(name.rpartition(".")[2] == "experts" for name, _ in self._model.named_modules())
        try:
            leaked = leak(self, vocab_size, device, experts)
            sequences = sample_tokens(vocab_size)
            difference = disagreement(routed_logits(self, sequences, device), self._own_logits(sequences), dtype)
        except Exception as error:  # transformers' modelling code may fail in any way; all of them mean the same here
            raise refusal(model_class, f"a trial run failed: {type(error).__name__}: {error}") from error
        if leaked is not None:
            reason = f"it mixes tokens by other means than attention (its logits change by {leaked:.2g} with their neighbours)"
            raise refusal(model_class, reason)
        if difference is not None:
            raise refusal(model_class, f"with the engine's attention its logits are off by {difference:.2g}")

    def _own_logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """float32 logits of each sequence, by transformers alone."""
        self._model.set_attn_implementation("eager")
        try:
            return [
                self._model(torch.tensor([ids], device=self._context.torch_device), use_cache=False, return_dict=True)
                .logits[0]
                .float()
                for ids in sequences
            ]
        finally:
            self._model.set_attn_implementation(ROUTED)


def _own_storage(model: Any, given: dict[str, Tensor]) -> None:
    """Copies parameters that still lie in the loader's host memory, which may be a mapped file."""
    borrowed = {tensor.untyped_storage().data_ptr() for tensor in given.values() if tensor.device.type == "cpu"}
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.untyped_storage().data_ptr() in borrowed:
            tensor.data = tensor.data.clone()
