"""Requests that arrive together behind one prefix, through the whole engine: the prefix is computed once, and the tokens are
those of an engine that shares nothing, whatever the chunks and the number of steps in flight.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotswap import LLM, SamplingParams
from hotswap.core.testing.tiny_models import make_tiny_model

REQUESTS, PREFIX, SUFFIX, NEW_TOKENS = 24, 64, 5, 6
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(11)
    prefix = [rng.randrange(4, 276) for _ in range(PREFIX)]
    return [prefix + [rng.randrange(4, 276) for _ in range(SUFFIX)] for _ in range(REQUESTS)]


def run(folder: Path, prompts: list[list[int]], **settings: Any) -> Iterator[Any]:
    fields: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 100,
        "block_size": 4,
        "num_gpu_blocks_override": 600,
    } | settings
    with LLM(str(folder), **fields) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS, use_tqdm=False)
        llm.check_integrity()
        yield [o.outputs[0].token_ids for o in outputs]
        yield llm.stats


@pytest.fixture(scope="module")
def without(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    tokens, stats = run(folder, prompts, enable_prefix_caching=False)
    assert stats.num_scheduled_tokens == REQUESTS * (PREFIX + SUFFIX + NEW_TOKENS - 1)
    return list(tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 30},
        {"max_num_seqs": 5, "max_num_batched_tokens": 48},
    ],
    ids=str,
)
def test_the_prefix_is_computed_once_and_the_tokens_are_the_same(
    folder: Path, prompts: list[list[int]], without: list[list[int]], settings: dict[str, Any]
) -> None:
    tokens, stats = run(folder, prompts, **settings)
    assert tokens == without
    assert stats.num_scheduled_tokens == PREFIX + REQUESTS * (SUFFIX + NEW_TOKENS - 1)
    assert stats.prefix_hits == (REQUESTS - 1) * PREFIX
