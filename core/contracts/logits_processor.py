"""Kind `logits_processor`: changes logits before a token is drawn. Any number are active; the operator names each.

Runs on the worker's device thread, once a step, on the whole batch, after the engine's own edits (allowed tokens, bad
words, logit_bias, penalties) and before temperature and filters. A processor that raises ends the requests whose rows it
cannot process, not the engine: the runner then asks it again for each row alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..sampling_params import SamplingParams
from .provider import BuildContext, Provider

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AddedRequest:
    """A request that this processor serves and that entered the batch, for the first time or again after preemption.

    slot: its place in the persistent batch while it stays there. token_ids: prompt, then outputs confirmed before a
    preemption; not to be kept by reference. arguments: what the request gave for this processor, validated and with
    defaults filled; empty for a processor that takes none.
    """

    request_id: int
    slot: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """What changed in the persistent batch since the last call, of the requests that this processor serves.

    To be applied in this order: removed (request ids), moved (from slot, to slot), added.
    """

    added: tuple[AddedRequest, ...] = ()
    removed: tuple[int, ...] = ()
    moved: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """The S rows of logits that a call is about, and where each stands. Tensors are on the worker's device.

    request_ids: the request of each row. Under speculation several rows are one request's: `draft_offsets` counts them from
        0, row i predicting the token at positions[i].
    token_ids: int32 [slots, stride], every request's tokens by slot; row i's history is token_ids[slots[i], :positions[i]].
        Entries at and beyond `positions` are undefined. Read only.
    slots, positions, num_prompt_tokens: int64 [S].
    """

    request_ids: tuple[int, ...]
    draft_offsets: tuple[int, ...]
    token_ids: Tensor
    slots: Tensor
    positions: Tensor
    num_prompt_tokens: Tensor


class LogitsProcessor(ABC):
    """One active processor. All methods are called on one thread."""

    def update_batch(self, update: BatchUpdate) -> None:
        """Requests that came and went. Called before the first `apply` that concerns them; not called when nothing
        changed. Raising ends the requests in `update.added`, of which nothing more is said. (The runner therefore adds
        requests one call each.)"""

    @abstractmethod
    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        """Edits logits float32 [S, V] in place, each row by itself: a row's result must not depend on the other rows.

        Must not wait for the device (`.item()`, `.cpu()`). A row left without a finite logit ends its request.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorProvider(Provider[LogitsProcessor]):
    """arguments: a pydantic model of what a request may say (`"logits_processors": {"NAME": {...}}`). None: requests say
    nothing, and the processor serves every request. With a model it serves the requests that name it. A request can name
    only processors that the operator activated; any other name is a 400."""

    arguments: type[BaseModel] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorContext(BuildContext):
    """torch_device: where the logits are. max_num_seqs: slots of the batch. logits_width: V."""

    torch_device: str = "cpu"
    max_num_seqs: int = 1
    logits_width: int = 0
