"""Policy `my_policy`: short prompts first, and whoever waits moves up."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts import KeyedPolicy, PolicyContext, PolicyProvider, RequestView, hookimpl


class MyPolicyOptions(BaseModel):
    """What may follow `--plugin policy=my_policy,`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens_per_second: float = Field(
        default=100.0, gt=0, description="How many prompt tokens a second in the queue makes up for."
    )


class MyPolicy(KeyedPolicy):
    """By prompt length plus arrival: nobody is passed for ever, as later ones start from further behind."""

    def __init__(self, options: MyPolicyOptions) -> None:
        super().__init__()
        self._tokens_per_second = options.tokens_per_second

    def key(self, view: RequestView) -> float:
        return view.num_prompt_tokens + self._tokens_per_second * view.arrival_time


def _build(context: PolicyContext) -> MyPolicy:
    options = context.options if isinstance(context.options, MyPolicyOptions) else MyPolicyOptions()
    return MyPolicy(options)


@hookimpl
def hotswap_policy() -> Iterator[PolicyProvider]:
    yield PolicyProvider(
        name="my_policy",
        build=_build,
        options=MyPolicyOptions,
        summary="short prompts first; whoever waits moves up",
    )
