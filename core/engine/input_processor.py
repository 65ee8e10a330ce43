"""From what a caller asks to what the engine runs: every check and every default, once, for every front end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from ..clock import Clock
from ..errors import RequestError
from ..sampling_params import SamplingParams
from ..text.tokenizer import Tokenizer
from .prompt_ids import outside_width
from .request_processors import RequestProcessors
from .wire import EngineInfo, EngineRequest

SALT_ALPHABET = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._~+/=:-")
MAX_SALT_CHARS = 256
MAX_BAD_WORD_TOKENS = 64  # each is compared with the end of the output in every step
_MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class InputLimits:
    """max_logprobs: alternatives per position. max_tokens_ceiling: the operator's own cap on output tokens, if any.

    checks_prompt_ids: whether prompts' token ids are checked here. False where the engine's own check comes at once, in
    this process: long prompts are then read once.
    """

    max_logprobs: int = 20
    max_tokens_ceiling: int | None = None
    checks_prompt_ids: bool = True


class InputProcessor:
    """Raises RequestError for whatever belongs to the caller; the engine checks again what could harm it."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        clock: Clock,
        limits: InputLimits,
        seed: int | None = None,
        processors: RequestProcessors | None = None,
    ) -> None:
        """seed: where the seeds of requests that bring none come from; None draws them afresh. processors: the logits
        processors that a request may name; none when not given."""
        self._info = info
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(set(eos_token_ids))
        self._clock = clock
        self._limits = limits
        self._processors = processors or RequestProcessors()
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._ids: Iterator[int] = itertools.count(1)

    def refresh(self, info: EngineInfo) -> None:
        """The engine's facts changed."""
        self._info = info

    def process(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
    ) -> list[EngineRequest]:
        """One engine request per choice (n of them), with fresh ids in choice order. Choice 0 alone computes the prompt's
        log-probabilities: they are the same for all."""
        self._check_priority(priority)
        prompt = self._checked_prompt(prompt_token_ids, params)
        _check_salt(cache_salt)
        filled = self._filled(params, len(prompt))
        now = self._clock.now()
        return [
            EngineRequest(
                request_id=next(self._ids),
                prompt_token_ids=prompt,
                sampling=_of_choice(filled, index),
                arrival_time=now,
                priority=priority,
                user=user,
                cache_salt=cache_salt,
            )
            for index in range(params.n)
        ]

    def _check_priority(self, priority: int) -> None:
        if priority != 0 and not self._info.uses_priority:
            raise RequestError(
                f"priority {priority}: the active policy does not serve by priority; leave it out or 0, or have the server "
                "run with --scheduling-policy priority",
                param="priority",
            )

    def _checked_prompt(self, ids: list[int], params: SamplingParams) -> list[int]:
        if not ids:
            raise RequestError("the prompt is empty: it must hold at least one token", param="prompt")
        width = self._info.logits_width
        if self._limits.checks_prompt_ids and (min(ids) < 0 or max(ids) >= width):
            raise outside_width(ids, width)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        window = self._info.max_model_len
        if len(ids) >= window:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but the context window is {window} tokens and at least one must be "
                "left to answer",
                param="prompt",
                code="context_length_exceeded",
            )
        return ids

    def _filled(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self._limits.max_logprobs:
                raise RequestError(f"{name} must be at most {self._limits.max_logprobs}, got {value}", param=name)
        room = self._info.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if self._limits.max_tokens_ceiling is not None:
            max_tokens = min(max_tokens, self._limits.max_tokens_ceiling)
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens ({params.min_tokens}) must not be larger than the {max_tokens} tokens that can be produced",
                param="min_tokens",
            )
        self._processors.check(params.logits_processors)  # they travel as they were asked, and are checked there again
        filled = params.clone(
            n=1,
            max_tokens=max_tokens,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            eos_token_ids=list(self._eos_token_ids),
            bad_words_token_ids=self._bad_words(params.bad_words),
            truncate_prompt_tokens=None,
        )
        filled.check_token_ids(self._info.logits_width)
        return filled

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Each word as it is spelled at the start of a text and after a space, as both can be drawn."""
        if not words:
            return []
        if self._tokenizer is None:
            raise RequestError("bad_words needs a tokenizer, and this engine runs without one", param="bad_words")
        spellings: list[list[int]] = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"bad_words: an entry is {len(ids)} tokens long; at most {MAX_BAD_WORD_TOKENS}",
                        param="bad_words",
                    )
                # A tokenizer can be longer than the logits: what cannot be drawn need not be banned.
                if ids and max(ids) < self._info.logits_width and ids not in spellings:
                    spellings.append(ids)
        return spellings


def _of_choice(filled: SamplingParams, index: int) -> SamplingParams:
    """Choice 0 is what the caller asked for."""
    if index == 0:
        return filled
    return filled.clone(seed=choice_seed(filled.seed or 0, index), prompt_logprobs=None)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of n: choice 0 keeps the request's own, so n does not change the first text.

    The others are mixed with SplitMix64's finaliser (Steele, Lea, Flood 2014), so neighbouring seeds do not share noise.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) >> 1


def _check_salt(salt: str | None) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_CHARS or not SALT_ALPHABET.issuperset(salt):
        raise RequestError(
            f"cache_salt must be a string of 1 to {MAX_SALT_CHARS} characters out of A-Z a-z 0-9 . _ ~ + / = : -",
            param="cache_salt",
        )
