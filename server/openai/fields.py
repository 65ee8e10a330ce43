"""The three lists of request fields: honoured (the protocol models), accepted without effect, refused.

A field that would change the answer is never dropped in silence: what is not served is an error that says so.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from typing import Any

from hotswap.core.errors import RequestError

log = logging.getLogger("hotswap.server")

# Known to clients, without a meaning for one server with one model: a hosted service's bookkeeping, billing, hints.
WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "session_id",
        "return_mm_kwargs",
        "prediction",
        "include_reasoning",
    }
)

# Names of older engines -> what to write instead.
REMOVED = {
    "guided_json": 'structured_outputs: {"json": ...}',
    "guided_regex": 'structured_outputs: {"regex": ...}',
    "guided_choice": 'structured_outputs: {"choice": [...]}',
    "guided_grammar": 'structured_outputs: {"grammar": ...}',
    "guided_decoding_backend": "structured_outputs",
    "guided_whitespace_pattern": "structured_outputs",
    "best_of": "n",
    "functions": "tools",
    "function_call": "tool_choice",
}

# Fields that ask for something this version does not do. The values listed ask for nothing and pass.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "tools": (),  # outside chat
    "structured_outputs": (),
    "reasoning_effort": ("none",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "verbosity": ("medium",),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "ec_transfer_params": (),
    "media_io_kwargs": (),
    "moderation": (),
    "thinking_token_budget": (-1,),
    "watermarking": (False,),
    "truncation_side": ("left",),
    "logprob_token_ids": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "stream_interval": (1,),
}


def check_fields(body: dict[str, Any], honoured: Iterable[str], *, allow_unknown: bool) -> None:
    """Raises RequestError (400) for the first field of `body` that is neither honoured nor harmless to leave out.

    null means "not said" for every field but an unknown one. With `allow_unknown`, unknown fields are one warning each.
    """
    known = frozenset(honoured)
    for name, value in body.items():
        if name in known or name in WITHOUT_EFFECT:
            continue
        if name in REMOVED:
            raise RequestError(
                f"{name} does not exist here: use {REMOVED[name]}", param=name, code="unsupported_parameter"
            )
        if name in NOT_SERVED:
            if value is None or any(value == neutral and type(value) is type(neutral) for neutral in NOT_SERVED[name]):
                continue
            raise RequestError(f"{name} is not served by this version", param=name, code="unsupported_parameter")
        if not allow_unknown:
            raise _unknown(name, known)
        _warn_once(name)


def _unknown(name: str, known: frozenset[str]) -> RequestError:
    # The name comes from outside: it is echoed only when it looks like a field's name.
    shown = name if len(name) <= 64 and name.isidentifier() and name.isascii() else "one field"
    near = difflib.get_close_matches(name[:64], sorted(known | WITHOUT_EFFECT | NOT_SERVED.keys()), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return RequestError(f"{shown} is not a field of this request{hint}", param=shown, code="unknown_parameter")


_warned: set[str] = set()
_MAX_WARNED = 100


def _warn_once(name: str) -> None:
    if name not in _warned and len(_warned) < _MAX_WARNED:
        _warned.add(name)
        log.warning("a request has the unknown field %r; it is ignored (--allow-unknown-fields)", name[:64])
