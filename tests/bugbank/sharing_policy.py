"""A policy plugin that gives each request few tokens a step: loaded by tests of group F with `--plugin FILE,tokens=N`.

So an older prompt is still in its chunks while a newer request draws tokens, which first come, first served never does.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.policy import Budget, KeyedPolicy, PolicyContext, PolicyProvider, RequestView


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tokens: int = Field(ge=1)


class Sharing(KeyedPolicy):
    """By arrival; at most `tokens` of a request in a step."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__()
        self._tokens = context.options.tokens if isinstance(context.options, Options) else 1

    def key(self, view: RequestView) -> float:
        return view.arrival_time

    def share(self, view: RequestView, budget: Budget) -> int:
        return self._tokens


@hookimpl
def hotswap_policy() -> Iterator[PolicyProvider]:
    yield PolicyProvider(name="sharing", build=Sharing, options=Options, summary="few tokens a request and step")
