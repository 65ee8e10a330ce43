"""Logits processor `my_logits_processor`: makes the tokens that were used last less likely."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from hotswap.core.contracts import BatchUpdate, LogitsProcessor, LogitsProcessorProvider, LogitsRows, hookimpl

if TYPE_CHECKING:
    from torch import Tensor


class MyLogitsProcessorArguments(BaseModel):
    """What a request may say: `"logits_processors": {"my_logits_processor": {"penalty": 2.5}}`."""

    penalty: float = Field(1.0, ge=0, le=100, description="Subtracted from the logit of each token in the window.")
    window: int = Field(16, ge=1, le=1024, description="How many of the last tokens count, the prompt's included.")


class MyLogitsProcessor(LogitsProcessor):
    def __init__(self) -> None:
        self._arguments: dict[int, Mapping[str, Any]] = {}  # by request; a request's slot may change

    def update_batch(self, update: BatchUpdate) -> None:
        for request_id in update.removed:
            del self._arguments[request_id]
        for request in update.added:
            self._arguments[request.request_id] = request.arguments

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        import torch  # here: the process that reads the hooks has no use for it

        # Everything stays on the device: no .item(), no mask as an index. What lies before the first token counts nothing.
        history = rows.token_ids.index_select(0, rows.slots)
        for row, request_id in enumerate(rows.request_ids):
            arguments = self._arguments[request_id]
            places = rows.positions[row] - 1 - torch.arange(arguments["window"], device=logits.device)
            recent = history[row].gather(0, places.clamp(min=0)).long()
            amounts = (places >= 0) * float(arguments["penalty"])
            logits[row] -= torch.zeros_like(logits[row]).scatter_reduce_(0, recent, amounts, "amax")


@hookimpl
def hotswap_logits_processor() -> Iterator[LogitsProcessorProvider]:
    yield LogitsProcessorProvider(
        name="my_logits_processor",
        build=lambda context: MyLogitsProcessor(),
        arguments=MyLogitsProcessorArguments,
        summary="Subtracts a penalty from the tokens that were used last.",
    )
