"""The messages between API process and engine process: msgspec structs in msgpack, over ZeroMQ on a unix socket. No pickle.

Every frame is one tagged struct. A frame that does not decode is dropped and counted by the receiver; it never raises there.
"""

from __future__ import annotations

import bisect
from typing import Any

import msgspec

from ..contracts.scheduler import RequestUpdate
from ..sampling_params import SamplingParams

PROTOCOL_VERSION = 1


class EngineRequest(msgspec.Struct, tag="add"):
    """A request to run. request_id is the front end's own number, unique while the engine lives; a client's label stays out."""

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    priority: int = 0
    user: str = ""
    deadline: float | None = None
    cache_salt: str | None = None
    adapter_key: str = ""  # identity and version of the adapter; "": the base model


class AbortRequests(msgspec.Struct, tag="abort"):
    """Ends requests, wherever they are. Unknown ids are ignored: they may have just finished."""

    request_ids: list[int]


class Call(msgspec.Struct, tag="call"):
    """An administrative call, answered by a Reply with the same id:

    "reset_prefix_cache" -> bool; "stats" -> EngineStats; "check_integrity" -> True;
    "set_policy" (name, options) -> {"policy", "distribution", "version", "victim"}; "inventory" -> rows.
    """

    call_id: int
    method: str
    arguments: dict[str, Any] = {}


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Ends the engine process at once; requests still in it are aborted."""


FrontMessage = EngineRequest | AbortRequests | Call | Shutdown


class EngineInfo(msgspec.Struct):
    """Facts that the front end learns once the engine is ready."""

    model: str
    architecture: str
    dtype: str
    max_model_len: int  # effective: the model's window, or what the pool holds if that is less
    max_prompt_len: int
    logits_width: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    inventory: list[dict[str, Any]] = []  # the engine's plugins, rows of `hotswap plugins --json`
    startup_seconds: dict[str, float] = {}
    uses_priority: bool = False  # whether the active policy serves by priority; others refuse one


class HistogramData(msgspec.Struct):
    """A histogram since engine start. bounds: upper bounds, ascending, without infinity. counts: per bucket, not
    cumulative, one more than bounds."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> HistogramData:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


STEP_TOKEN_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SECONDS_BOUNDS = (1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


def _step_tokens() -> HistogramData:
    return HistogramData.empty(STEP_TOKEN_BOUNDS)


def _step_seconds() -> HistogramData:
    return HistogramData.empty(STEP_SECONDS_BOUNDS)


class EngineStats(msgspec.Struct):
    """Gauges are now; counters grow from engine start."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    kv_usage: float = 0.0  # 0 to 1
    kv_waste: float = 0.0  # 0 to 1: unused token slots in allocated blocks, shared blocks counted once
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    last_step_tokens: int = 0
    schedule_seconds: float = 0.0  # of the last step
    execute_seconds: float = 0.0
    update_seconds: float = 0.0
    num_bad_frames: int = 0
    host_cache_usage: float = 0.0  # 0 to 1; 0 without a host tier
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: list[int] = []
    num_observer_faults: int = 0
    step_tokens: HistogramData = msgspec.field(default_factory=_step_tokens)
    schedule_times: HistogramData = msgspec.field(default_factory=_step_seconds)
    execute_times: HistogramData = msgspec.field(default_factory=_step_seconds)
    update_times: HistogramData = msgspec.field(default_factory=_step_seconds)


class Ready(msgspec.Struct, tag="ready"):
    """The engine serves. Sent again, before the Reply, when a call changed its facts."""

    info: EngineInfo
    protocol: int = PROTOCOL_VERSION


class StartupProgress(msgspec.Struct, tag="progress"):
    """done of total units of `what` ("weights", ...); total 0 means unknown."""

    what: str
    done: int
    total: int


class Outputs(msgspec.Struct, tag="outputs"):
    """Everything that one update confirmed."""

    updates: list[RequestUpdate]
    stats: EngineStats | None = None  # not with every step: gauges are cheap to read late and dear to gather often


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """Sent twice a second by a thread of its own, so that a long step does not silence the engine.

    stalled_seconds: since the loop last came round: at most half a second while idle, else the age of the step it waits for.
    dead_threads: names of the engine's threads that ended though they should not.
    """

    stalled_seconds: float
    dead_threads: list[str] = []


class Reply(msgspec.Struct, tag="reply"):
    call_id: int
    result: Any = None
    error: str | None = None


class Dead(msgspec.Struct, tag="dead"):
    """The engine's last word: its root cause in one line."""

    cause: str
    exit_code: int = 1


EngineMessage = Ready | StartupProgress | Outputs | Heartbeat | Reply | Dead
