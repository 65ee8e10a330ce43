"""What one call may multiply: lists of token ids are carried by every choice."""

from __future__ import annotations

import pytest

from hotswap.core.clock import ManualClock
from hotswap.core.engine.input_processor import MAX_BAD_WORD_TOKENS, InputLimits, InputProcessor
from hotswap.core.engine.wire import EngineInfo
from hotswap.core.errors import RequestError
from hotswap.core.sampling_params import _CONTAINERS, MAX_ALLOWED_TOKEN_IDS, SamplingParams
from hotswap.core.testing.fake_engine import byte_tokenizer


def test_allowed_token_ids_are_bounded_over_all_choices() -> None:
    ids = list(range(4096))
    assert SamplingParams(n=64, allowed_token_ids=ids).allowed_token_ids == ids
    with pytest.raises(RequestError, match="4096 entries; at most 2048") as refusal:
        SamplingParams(n=128, allowed_token_ids=ids)
    assert refusal.value.param == "allowed_token_ids"
    with pytest.raises(RequestError):
        SamplingParams(allowed_token_ids=[1] * (MAX_ALLOWED_TOKEN_IDS + 1))


def test_bad_words_are_bounded_in_tokens() -> None:
    """Each is compared in every step: a few hundred characters that are three tokens each would stop the others."""
    info = EngineInfo("tiny", "Tiny", "float32", 64, 63, 512, 16, 16, 4, 64, "cpu")
    inputs = InputProcessor(info, byte_tokenizer(), (), ManualClock(), InputLimits())
    (request,) = inputs.process([1], SamplingParams(bad_words=["no"], max_tokens=4))
    assert request.sampling.bad_words_token_ids
    with pytest.raises(RequestError, match=f"at most {MAX_BAD_WORD_TOKENS}") as refusal:
        inputs.process([1], SamplingParams(bad_words=["\u4e00" * 200], max_tokens=4))
    assert (refusal.value.param, refusal.value.status) == ("bad_words", 400)


def test_clone_knows_every_container() -> None:
    """A list that it did not copy would be shared by two requests."""
    types = SamplingParams.__annotations__
    assert set(_CONTAINERS) == {name for name, kind in types.items() if str(kind).startswith(("list", "dict"))}
