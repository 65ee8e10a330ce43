"""Greedy output of the real model equals transformers, token for token, in float32, however the work is cut up.

The quick set (6 prompts) runs in `make test`, all 32 in `make test-full`. Every mode must give the same tokens as `alone`, and
`alone` must be transformers' greedy path.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotswap import LLM, SamplingParams
from hotswap.core.testing.oracle import greedy_differences

NEW_TOKENS = 64
EOS = (2,)  # ignore_eos keeps it from being drawn

TEXTS = [
    "Hi",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Liste de courses : pommes, poires,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is the boiling point of water at sea level?\nA:",
    "東京は日本の",
]


def make_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Lengths from 2 to 900 tokens: short texts, repeated and mixed texts, and random ids."""
    rng = random.Random(7)
    lengths = [2, 3, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 129, 200, 255, 256, 300, 400, 512, 640, 777, 900]
    prompts = [tokenizer.encode(text) for text in TEXTS]
    prompts = [p if len(p) > 1 else [*p, 198] for p in prompts]
    corpus = tokenizer.encode(" ".join(rng.choice(TEXTS) for _ in range(300)))
    for n, length in enumerate(lengths):
        if n % 3 == 2:
            prompts.append([rng.randrange(20, 49000) for _ in range(length)])
        else:
            start = rng.randrange(0, len(corpus) - length)
            prompts.append(corpus[start : start + length])
    prompts += [[1, *prompts[1]], prompts[9] + prompts[8]]
    assert len(prompts) == 32
    assert min(map(len, prompts)) == 2 and max(map(len, prompts)) == 900
    if count == 32:
        return prompts
    return [prompts[i] for i in (0, 1, 7, 12, 18, 26)][:count]


MODES: dict[str, dict[str, Any]] = {
    "together": {},
    "synchronous": {"async_scheduling": False},
    "small chunks": {"max_num_batched_tokens": 48},
    "no prefix cache": {"enable_prefix_caching": False},
    "preemption": {"num_gpu_blocks_override": 61, "max_num_batched_tokens": 256},
    "preemption, synchronous": {"num_gpu_blocks_override": 61, "async_scheduling": False},
}

# Each half of the one and both sides of the other are in the default run.
LONG_RUN_ONLY = ("preemption, synchronous", "no prefix cache")

COUNTS = [pytest.param(6, id="quick"), pytest.param(32, id="all", marks=pytest.mark.full)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS, use_tqdm=False)
    llm.check_integrity()
    return [o.outputs[0].token_ids for o in outputs]


def make_llm(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), dtype="float32", max_model_len=1024, **{"num_gpu_blocks_override": 3000, **settings})


@pytest.fixture(scope="module", params=COUNTS)
def reference(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Prompts, and what each gives when it is served alone."""
    with make_llm(smollm2_path) as llm:
        prompts = make_prompts(llm.get_tokenizer(), request.param)
        yield prompts, [run(llm, [prompt])[0] for prompt in prompts]


def test_alone_equals_transformers(reference: tuple[list[list[int]], list[list[int]]], smollm2_oracle: Any) -> None:
    for prompt, output in zip(*reference, strict=True):
        assert len(output) == NEW_TOKENS
        assert greedy_differences(smollm2_oracle, prompt, output, EOS) == [], f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.full] if mode in LONG_RUN_ONLY else []) for mode in MODES]
)
def test_every_mode_gives_the_same_tokens(
    mode: str, reference: tuple[list[list[int]], list[list[int]]], smollm2_path: Path
) -> None:
    prompts, expected = reference
    with make_llm(smollm2_path, **MODES[mode]) as llm:
        assert run(llm, prompts) == expected
        if mode.startswith("preemption"):
            assert llm.stats.num_preemptions_recompute > 0, "the pool was not small enough to force a preemption"


def test_prefix_hits_give_the_same_tokens(
    reference: tuple[list[list[int]], list[list[int]]], smollm2_path: Path
) -> None:
    prompts, expected = reference
    with make_llm(smollm2_path) as llm:
        assert run(llm, prompts) == expected
        before = llm.stats.prefix_hits
        assert run(llm, prompts) == expected
        assert llm.stats.prefix_hits - before > sum(map(len, prompts)) // 2
        assert llm.reset_prefix_cache()
