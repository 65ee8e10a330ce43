"""From request fields to SamplingParams: the request's own values, else the model's defaults, else the engine's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hotswap.core.errors import RequestError
from hotswap.core.sampling_params import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS, MAX_N, SamplingParams

from .protocol import SamplingFields

COMPLETION_MAX_TOKENS = 16  # OpenAI's default of /v1/completions; chat goes on to the end of the window
MAX_LOGITS_PROCESSORS = 16
_TOKEN_ID = re.compile(r"-?[0-9]{1,10}")
# The same name and meaning in the request and in SamplingParams.
_PLAIN = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
)


def num_choices(fields: SamplingFields, num_prompts: int, max_requests_per_call: int) -> int:
    """n, bounded before anything is multiplied by it (S-31, S-32). Raises RequestError (400)."""
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= MAX_N:
        raise RequestError(f"n must be between 1 and {MAX_N}", param="n")
    if num_prompts * n > max_requests_per_call:
        raise RequestError(
            f"{num_prompts} prompts with n={n} make {num_prompts * n} choices; at most {max_requests_per_call} fit in "
            "one call (--max-requests-per-call)",
            param="n" if num_prompts == 1 else "prompt",
        )
    if len(fields.allowed_token_ids or ()) * num_prompts * n > MAX_ALLOWED_TOKEN_IDS:
        raise RequestError(
            f"allowed_token_ids: at most {MAX_ALLOWED_TOKEN_IDS // (num_prompts * n)} entries for {num_prompts * n} choices",
            param="allowed_token_ids",
        )
    return n


def sampling_params(
    fields: SamplingFields,
    defaults: Mapping[str, Any],
    *,
    default_max_tokens: int | None,
    logprobs: int | None,
    has_text: bool,
) -> SamplingParams:
    """has_text: whether there is a tokenizer to make text. Raises RequestError (400) naming the field that is out of
    range."""
    values: dict[str, Any] = dict(defaults)
    values.setdefault("max_tokens", default_max_tokens)
    for name in _PLAIN:
        value = getattr(fields, name)
        if value is not None:
            values[name] = value
    max_tokens = requested_max_tokens(fields)
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    elif (values["max_tokens"] or 0) < (fields.min_tokens or 0) and values["max_tokens"] is not None:
        values["max_tokens"] = None  # a default never forbids what the client asks for; the window still bounds it
    if fields.stop is not None:
        values["stop"] = [fields.stop] if isinstance(fields.stop, str) else list(fields.stop)
    if fields.logit_bias:
        values["logit_bias"] = _logit_bias(fields.logit_bias)
    if fields.logits_processors:
        values["logits_processors"] = _logits_processors(fields.logits_processors)
    return SamplingParams(**values, logprobs=logprobs, detokenize=has_text)


def _logits_processors(named: Mapping[str, dict[str, Any]] | list[str]) -> dict[str, dict[str, Any]]:
    """Options by name. Whether there are such plugins is the engine's to know, and it says so for every front end."""
    if len(named) > MAX_LOGITS_PROCESSORS:
        what = f"logits_processors has {len(named)} entries; at most {MAX_LOGITS_PROCESSORS}"
        raise RequestError(what, param="logits_processors")
    if isinstance(named, list):
        return {name: {} for name in named}
    return dict(named)


def requested_max_tokens(fields: SamplingFields) -> int | None:
    """max_tokens under either of its names. Raises RequestError when they differ."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    return new if old is None else old


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS}", param="logit_bias")
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError("logit_bias: every key must be a token id in decimal digits", param="logit_bias")
        token_id = int(key)
        if token_id in result:
            raise RequestError("logit_bias: two keys are the same token id", param="logit_bias")
        result[token_id] = value
    return result
