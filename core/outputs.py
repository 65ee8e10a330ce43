"""What a caller gets back. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import RequestError


@dataclass(slots=True)
class Logprob:
    """One token's log-probability (natural log of the raw model's softmax), its rank (1 = most probable) and its text."""

    logprob: float
    rank: int
    decoded_token: str = ""
    bytes: bytes = b""


# One position: token id -> Logprob, the chosen token first, then alternatives, best first.
TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One choice. finish_reason: None while it goes on, else "stop", "length", "abort" or "error".
    stop_reason: the stop string or stop token id that ended it; None for end-of-sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All choices of one prompt. prompt_logprobs: one entry per prompt token; the first is None (nothing precedes it).

    error_*: as in RequestError, when `error` is set. queue_seconds, prefill_seconds: of the choices whose first token this
    delta brings: waiting for a place, and from there to the token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False
    error: str | None = None
    error_status: int = 500
    error_code: str | None = None
    error_param: str | None = None
    queue_seconds: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)

    def raise_error(self) -> None:
        """Raises RequestError when the request failed."""
        if self.error is not None:
            raise RequestError(self.error, param=self.error_param, code=self.error_code, status=self.error_status)
