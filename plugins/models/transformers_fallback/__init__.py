"""Model `transformers`: any causal language model that transformers knows and no native family serves.
 Its modelling code runs as it is; only attention is routed to the engine's paged backends. Models whose attention
cannot be routed so, or that mix tokens by other means, are refused at start.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.model import Model, ModelContext, ModelProvider
from hotswap.core.contracts.provider import CompatibilityRow


def _build(context: ModelContext) -> Model:
    from .model import TransformersModel

    return TransformersModel(context)


def _unavailable(context: ModelContext) -> Sequence[str]:
    if importlib.util.find_spec("transformers") is None:
        return ["the package transformers is not installed"]
    return []


@hookimpl
def hotswap_model() -> Iterator[ModelProvider]:
    yield ModelProvider(
        name="transformers",
        build=_build,
        fallback=True,
        unavailable=_unavailable,
        combines=(
            CompatibilityRow(
                "model=transformers",
                "deterministic",
                False,
                "--deterministic: this model runs in transformers' own code, whose products depend on the batch; leave it out",
            ),
        ),
        summary="Any other causal language model of transformers: its modelling code, this engine's attention.",
    )
