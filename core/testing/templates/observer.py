"""Observer `my_observer`: one line in the log for each so many requests that ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.contracts import FinishedRequest, Observer, ObserverContext, Provider, hookimpl


class MyObserverOptions(BaseModel):
    """What may follow `--plugin observer=my_observer,`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(default=100, ge=1, description="How many requests end between two lines.")


class MyObserver(Observer):
    """Counts; keeps numbers, no requests. `on_arrival` and `on_step` stay as they are and so cost nothing."""

    def __init__(self, logger: logging.Logger, every: int) -> None:
        self._logger = logger
        self._every = every
        self._num_requests = 0
        self._num_tokens = 0

    def on_finish(self, request: FinishedRequest) -> None:
        self._num_requests += 1
        self._num_tokens += request.num_output_tokens
        if self._num_requests % self._every == 0:
            self._report()

    def close(self) -> None:
        self._report()

    def _report(self) -> None:
        self._logger.info("%d requests, %d output tokens", self._num_requests, self._num_tokens)


def _build(context: ObserverContext) -> MyObserver:
    options = context.options if isinstance(context.options, MyObserverOptions) else MyObserverOptions()
    return MyObserver(context.logger, options.every)


@hookimpl
def hotswap_observer() -> Iterator[Provider[Observer]]:
    yield Provider(name="my_observer", build=_build, options=MyObserverOptions, summary="logs how many requests ended")
