"""Policy `shortest_first`: the least predicted work first, over a length predictor that learns from the requests that end.

Shortest job first gives the least mean waiting time when lengths are known (Smith, "Various optimizers for single-stage
production", 1956). Fu et al., "Efficient LLM Scheduling by Learning to Rank", arXiv 2408.15792, and Qiu et al., "Efficient
Interactive LLM Serving with Proxy Model-based Sequence Length Prediction", arXiv 2404.08509, show that predictions good enough
to rank requests bring most of that to language models. Theirs come from a model that reads the prompt; here they are running
means by user and length of prompt, which cost nothing, need no training, and know less.

Like theirs it does not interrupt a running request for a shorter one. Ageing here is linear: what is in front of a request
shrinks as it waits, so that one of w tokens of work is passed only by those that arrive less than w / tokens_per_second later.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts.hooks import hookimpl
from hotswap.core.contracts.policy import PolicyContext, PolicyProvider, RequestView

from .length_predictor import LengthPredictor
from .queued import QueuedPolicy

REORDERED_PER_STEP = 8


class ShortestFirstOptions(BaseModel):
    """What may follow `--plugin policy=shortest_first,`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens_per_second: float = Field(
        default=50.0,
        ge=0,
        allow_inf_nan=False,
        description="How many tokens of work a second in the queue makes up for; 0: long ones may wait for ever.",
    )
    prompt_weight: float = Field(
        default=0.2,
        ge=0,
        allow_inf_nan=False,
        description="The work of a prompt token that is not cached, where an output token's is 1.",
    )
    memory: int = Field(default=200, ge=1, description="How many requests that ended count most in a prediction.")


class ShortestFirst(QueuedPolicy[tuple[float]]):
    """By predicted work less what waiting makes up for. Everybody's wait grows alike, so arrival times say all of it: the
    order of two requests changes only when a prediction does. In each step some keys are made anew, in turn.
    """

    def __init__(self, options: ShortestFirstOptions) -> None:
        super().__init__()
        self._tokens_per_second = options.tokens_per_second
        self._prompt_weight = options.prompt_weight
        self._predictor = LengthPredictor(options.memory)

    def key(self, view: RequestView) -> tuple[float]:
        return (self.work(view) + self._tokens_per_second * view.arrival_time,)

    def work(self, view: RequestView) -> float:
        """Tokens that are left, in output tokens. One that has outrun its prediction is taken to be half done."""
        produced = view.num_output_tokens
        in_all = self._predictor.predict(view.user, view.num_prompt_tokens, view.max_tokens)
        left = in_all - produced if in_all > produced else produced
        to_compute = view.num_prompt_tokens + produced - view.num_cached_prompt_tokens
        return self._prompt_weight * to_compute + min(left, view.max_tokens - produced)

    def reorder(self) -> None:
        for view in self._queue.rotate(REORDERED_PER_STEP):
            self._queue.put(view, self.key(view))

    def on_finish(self, view: RequestView) -> None:
        if view.num_output_tokens:  # else it was refused or aborted before it said anything about lengths
            self._predictor.learn(view.user, view.num_prompt_tokens, view.num_output_tokens)


@hookimpl
def hotswap_policy() -> Iterator[PolicyProvider]:
    def build(context: PolicyContext) -> ShortestFirst:
        options = context.options if isinstance(context.options, ShortestFirstOptions) else ShortestFirstOptions()
        return ShortestFirst(options)

    yield PolicyProvider(
        name="shortest_first",
        build=build,
        options=ShortestFirstOptions,
        summary="the least predicted work first, by lengths learnt while serving; waiting makes up for length",
    )
