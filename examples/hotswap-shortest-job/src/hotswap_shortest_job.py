"""Policy `shortest_job`: the waiting request with the least work left goes first; waiting counts as less work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts import KeyedPolicy, PolicyContext, PolicyProvider, RequestView, hookimpl


class Options(BaseModel):
    """--plugin policy=shortest_job,output_weight=0,patience=100"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    output_weight: float = Field(
        0.25, ge=0, description="How much of max_tokens counts as work; 0 looks at the prompt only."
    )
    patience: float = Field(200.0, gt=0, description="Tokens of work that a second of waiting outweighs.")


class ShortestJob(KeyedPolicy):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options

    def key(self, view: RequestView) -> float:
        """Work and arrival, both in tokens: whoever came `extra work / patience` seconds earlier goes first, so nobody
        starves. No clock is needed: all who wait grow older at the same pace."""
        to_compute = view.num_prompt_tokens + view.num_output_tokens - view.num_cached_prompt_tokens
        to_produce = self._options.output_weight * (view.max_tokens - view.num_output_tokens)
        return to_compute + to_produce + self._options.patience * view.arrival_time


def build(context: PolicyContext) -> ShortestJob:
    return ShortestJob(cast(Options, context.options))  # validated by hotswap


@hookimpl
def hotswap_policy() -> Iterator[PolicyProvider]:
    yield PolicyProvider(
        name="shortest_job",
        build=build,
        options=Options,
        summary="least work left first; waiting counts",
    )
