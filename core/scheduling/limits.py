"""What a step and the queue may hold, and the checks of those settings at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from ..config import SchedulerConfig


TOKENS_WORTH_A_STEP = 64  # on a GPU, where a step of few rows reads the weights anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingLimits:
    """max_num_batched_tokens: tokens in a step. max_num_seqs: requests running at once. max_model_len: the model's
    window.

    max_num_queued_reqs: requests waiting at once before more are refused with 429; None is no limit.
    enable_chunked_prefill: whether a prompt may be split over steps. chunkable: the model's own word (False: never
        split, and no prefix reuse either, since a token's KV then depends on what follows it).
    min_tokens_awaited: a request waits for a prefix that another one is computing only when that saves so many tokens (the
        plan builder has the whole rule): a few more in a step cost a GPU less than a step's latency costs the client.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_queued_reqs: int | None = None
    enable_chunked_prefill: bool = True
    chunkable: bool = True
    min_tokens_awaited: int = TOKENS_WORTH_A_STEP

    @property
    def chunked(self) -> bool:
        return self.enable_chunked_prefill and self.chunkable


def limits_of(
    asked: SchedulerConfig, window: int, *, on_cpu: bool, model_is_chunkable: bool = True
) -> SchedulingLimits:
    """What the settings say, and for what they leave open what suits the device."""
    budget = asked.max_num_batched_tokens
    if budget is None:
        budget = 512 if on_cpu else 8192
        if not asked.enable_chunked_prefill or not model_is_chunkable:
            budget = max(budget, window)
    return SchedulingLimits(
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=window,
        max_num_queued_reqs=asked.max_num_queued_reqs,
        enable_chunked_prefill=asked.enable_chunked_prefill,
        chunkable=model_is_chunkable,
        min_tokens_awaited=1 if on_cpu else TOKENS_WORTH_A_STEP,  # a CPU pays for each
    )


def effective_window(max_model_len: int, num_blocks: int, block_size: int) -> int:
    """The most tokens that one request may have: the model's window, or what the whole pool holds if that is less."""
    return min(max_model_len, num_blocks * block_size)


def check_limits(limits: SchedulingLimits, window: int) -> None:
    """Raises UsageError when these limits cannot serve every request that `window` (see effective_window) allows."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        if getattr(limits, name) < 1:
            raise UsageError(f"{name} must be at least 1, got {getattr(limits, name)}")
    if not limits.chunked and limits.max_num_batched_tokens < window:
        why = "chunked prefill is off" if limits.chunkable else "this model's prompts cannot be split"
        raise UsageError(
            f"max_num_batched_tokens ({limits.max_num_batched_tokens}) is less than the window ({window} tokens), and "
            f"{why}: a longer prompt could never run. Set max_num_batched_tokens to at least {window}, "
            "or lower max_model_len."
        )
