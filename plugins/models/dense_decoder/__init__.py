"""Model `dense_decoder`: one configurable decoder for the dense families that differ in a handful of traits."""

from __future__ import annotations

from collections.abc import Iterator

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.model import Model, ModelContext, ModelProvider

from .traits import TRAITS


def _build(context: ModelContext) -> Model:
    from .model import DenseDecoder

    return DenseDecoder(context)


@hookimpl
def hotswap_model() -> Iterator[ModelProvider]:
    yield ModelProvider(
        name="dense_decoder",
        build=_build,
        architectures=tuple(TRAITS),
        priority=10,
        summary="Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma, OLMo 2, SmolLM3, Granite, from the engine's own layers.",
    )
