"""A request inside the engine: states and counts. The scheduling mechanism owns every mutable field.

    tokens:    |<-- num_computed_tokens -->|<-- in flight -->|<-- wanted -->|
               0                                             ^ num_scheduled_tokens
"Known" tokens are the prompt and the confirmed outputs; a placeholder stands for an output that is being drawn in
flight.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .contracts.plan import PositionLogprobs


class Status(enum.Enum):
    WAITING = "waiting"
    WAITING_FOR = "waiting_for"  # the reason is in `waiting_for`
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class WaitingReason(enum.Enum):
    GRAMMAR = "grammar"
    SWAP_IN = "swap_in"
    REMOTE_KV = "remote_kv"
    ADAPTER = "adapter"
    PREFIX = "prefix"  # blocks that it shares are being computed for another request


@dataclass(slots=True, eq=False)
class Request:
    """Satisfies contracts.policy.RequestView."""

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    priority: int = 0  # what it is served by: the client's, or 0 under a policy that does not use priorities
    user: str = ""
    deadline: float | None = None
    cache_salt: str | None = None
    adapter_key: str = ""  # identity and version of the adapter (a digest of its weights); "": the base model
    client_priority: int = 0  # what the client said
    max_tokens: int = 0  # set at admission: the most output tokens that fit the window

    status: Status = Status.WAITING
    waiting_for: WaitingReason | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_placeholders: int = 0  # outputs in flight
    num_in_flight_steps: int = 0
    num_cached_prompt_tokens: int = 0  # of the first admission: what `cached_tokens` in usage reports
    num_preemptions: int = 0
    draft_acceptance: float = 0.0
    block_ids: list[int] = field(default_factory=list)  # of cache group 0
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks of known tokens, filled lazily
    num_hashed_blocks: int = 0  # how many of block_ids are in the prefix index under this request's hashes
    num_announced_blocks: int = (
        0  # how many of block_ids are that, or all in flight and of known tokens (see PendingBlocks)
    )
    num_holds: int = 0  # how often it was made to wait for blocks that another one computes
    preempt_pending: bool = False  # yields its blocks once nothing of it is in flight
    finish_pending: str | None = None  # "abort", ...: ends once nothing of it is in flight
    first_scheduled_time: float | None = None  # seconds on the engine's clock; preemption changes neither
    first_token_time: float | None = None
    finish_reason: str | None = None  # set when it ends
    last_step_id: int = (
        -1
    )  # the last step that holds this request: its blocks are not reused before that step is complete
    stopping_ids: frozenset[int] = frozenset()  # set at admission: every token that may end it (eos and stop_token_ids)
    prompt_logprobs_pending: bool = False  # set at admission, cleared when they are handed out
    prompt_logprobs: list[PositionLogprobs | None] = field(
        default_factory=list
    )  # by prompt position; entry 0 stays None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_known_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)
