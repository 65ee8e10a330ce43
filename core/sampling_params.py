"""How one request is sampled and when it stops. Names and defaults are vLLM's; the values are checked once, here."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable
from itertools import chain
from typing import Any

import msgspec

from .errors import RequestError

MAX_N = 128
MAX_LOGIT_BIAS = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BAD_WORDS = 128
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18  # over all choices, each of which carries its own copy; no vocabulary has more tokens
GREEDY_TEMPERATURE = 1e-5  # a temperature below this is greedy: dividing by it would only overflow
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
INT_MAX = 2**31 - 1
# Smallest and largest value of each number; read by the API document as well.
INTEGER_BOUNDS: dict[str, tuple[int, int]] = {
    "n": (1, MAX_N),
    "top_k": (-1, INT_MAX),
    "seed": (SEED_MIN, SEED_MAX),
    "max_tokens": (0, INT_MAX),
    "min_tokens": (0, INT_MAX),
    "logprobs": (0, INT_MAX),
    "prompt_logprobs": (0, INT_MAX),
    "truncate_prompt_tokens": (1, INT_MAX),
}
NUMBER_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 1e6),
}
_NEVER_NONE = frozenset({"n", "top_k", "min_tokens"})
ABOVE_LOWEST = frozenset({"top_p", "repetition_penalty"})  # whose smallest value is itself out of range
_integers_of = operator.attrgetter(*INTEGER_BOUNDS)
_numbers_of = operator.attrgetter(*NUMBER_BOUNDS)
_CONTAINERS = (
    "stop",
    "stop_token_ids",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "logits_processors",
    "eos_token_ids",
    "bad_words_token_ids",
)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Raises RequestError (with `param`) on a value out of range, when constructed.

    temperature: 0 (or below 1e-5) is greedy. top_k: 0 or -1 is off, and so is a value at or above the vocabulary.
    seed: any signed 64-bit integer, 0 and negative ones included; None draws a fresh one. Choice i of n uses its own noise.
    logprobs, prompt_logprobs: how many alternatives to report beside the chosen token; 0 reports the chosen token only.
    stop: text that ends the output. Found where text is made (the API process); stop_token_ids are found in the engine.
    detokenize: False leaves `text` empty; stop strings then cannot be used.
    logits_processors: arguments of active logits_processor plugins by name, for those that serve only who names them.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] = msgspec.field(default_factory=list)
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    bad_words: list[str] = msgspec.field(default_factory=list)
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    logits_processors: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    # Filled in by the front end, which knows tokenizer and model; never by a client.
    eos_token_ids: list[int] = msgspec.field(default_factory=list)
    bad_words_token_ids: list[list[int]] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        elif self.stop is None:
            self.stop = []
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        if self.logit_bias is None:
            self.logit_bias = {}
        if self.bad_words is None:
            self.bad_words = []
        if self.seed == -1:
            self.seed = None  # the rule that vLLM's users know: -1 asks for a fresh seed
        self._check_numbers()
        self._check_lists()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def _check_numbers(self) -> None:
        # Every request comes here, so the usual case, a plain number within its bounds, costs no call.
        for (name, (lowest, highest)), value in zip(INTEGER_BOUNDS.items(), _integers_of(self), strict=True):
            if not (type(value) is int and lowest <= value <= highest) and (value is not None or name in _NEVER_NONE):
                _integer(name, value, lowest, highest)
        for (name, (low, high)), value in zip(NUMBER_BOUNDS.items(), _numbers_of(self), strict=True):
            if not (type(value) is float and low <= value <= high) or (value == low and name in ABOVE_LOWEST):
                _number(name, value, low, high, open_low=name in ABOVE_LOWEST)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not be larger than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )

    def _check_lists(self) -> None:
        _strings("stop", self.stop, MAX_STOPS, MAX_STOP_CHARS)
        _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_CHARS)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True: they are found in the text", param="stop")
        _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids must not be empty: no token could be drawn", param="allowed_token_ids"
                )
            _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS // self.n)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias"
            )
        _token_ids("logit_bias", list(self.logit_bias), MAX_LOGIT_BIAS)
        for value in self.logit_bias.values():
            _number("logit_bias", value, -100.0, 100.0)

    def check_token_ids(self, logits_width: int) -> None:
        """Every token id against the width of a logits row (S-39). Raises RequestError naming the field and the id."""
        if not (self.stop_token_ids or self.allowed_token_ids or self.logit_bias or self.bad_words_token_ids):
            return
        fields: list[tuple[str, Iterable[int]]] = [
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", self.logit_bias),
            ("bad_words", chain.from_iterable(self.bad_words_token_ids)),
        ]
        for name, ids in fields:
            for token_id in ids:
                if not 0 <= token_id < logits_width:
                    raise RequestError(f"{name}: token id {token_id} is outside 0..{logits_width - 1}", param=name)

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed; containers are copied too."""
        copied = copy.copy(self)
        for name in _CONTAINERS:
            value = getattr(self, name)
            if name not in changes and isinstance(value, (list, dict)):
                setattr(copied, name, value.copy())
        for name, value in changes.items():
            setattr(copied, name, value)
        copied.__post_init__()
        return copied


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r:.80}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {value}", param=name)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r:.80}", param=name)
    if value > high or value < low or (open_low and value == low):
        raise RequestError(
            f"{name} must be {'above' if open_low else 'at least'} {low} and at most {high}, got {value}", param=name
        )


def _strings(name: str, values: Any, max_count: int, max_chars: int) -> None:
    if isinstance(values, list) and not values:
        return
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise RequestError(f"{name} must be a string or a list of strings", param=name)
    if len(values) > max_count:
        raise RequestError(f"{name} has {len(values)} entries; at most {max_count}", param=name)
    for value in values:
        if not value:
            raise RequestError(f"{name} must not contain an empty string", param=name)
        if len(value) > max_chars:
            raise RequestError(f"{name}: an entry has {len(value)} characters; at most {max_chars}", param=name)


def _token_ids(name: str, values: Any, max_count: int) -> None:
    if not isinstance(values, list):
        raise RequestError(f"{name} must be a list of token ids", param=name)
    if len(values) > max_count:
        raise RequestError(f"{name} has {len(values)} entries; at most {max_count}", param=name)
    for value in values:
        _integer(name, value, 0, 2**31 - 1)
