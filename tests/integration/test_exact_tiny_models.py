"""Every native family, and architectures that only transformers knows, through the whole engine: greedy tokens equal
transformers' in float32, alone and in every way that the work can be cut up.

The models are random and tiny: what they lack in sense they have in variety (each rope type, windows, biases, tied heads).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hotswap import LLM, SamplingParams
from hotswap.core.testing.oracle import greedy_differences, transformers_model
from hotswap.core.testing.tiny_models import make_tiny_model
from hotswap.plugins.models.transformers_fallback.examine import pin_rope

# The first families in the quick set, every variant of them in the full one.
FAMILIES = ["llama", "llama-tied", "mistral", "qwen2", "qwen3"]
VARIANTS = [
    "llama-head-dim", "llama-mqa", "llama-bias", "llama-odd-vocab", "llama-linear", "llama-dynamic", "llama-yarn",
    "llama-llama3", "llama-longrope", "mistral-full", "qwen2-window", "phi3", "phi3-partial-longrope", "gemma", "gemma2",
    "gemma3", "olmo2", "smollm3", "granite",
]  # fmt: skip
FALLBACK = ["gpt-neox", pytest.param("starcoder2", marks=pytest.mark.full), "opt"]
MODELS = [*FAMILIES, *FALLBACK, *(pytest.param(name, marks=pytest.mark.full) for name in VARIANTS)]

MODES: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "synchronous": {"async_scheduling": False},
    "small chunks": {"max_num_batched_tokens": 7},
    "tiny pool": {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 32},
    "tiny pool, synchronous": {"num_gpu_blocks_override": 30, "async_scheduling": False},
    "reference attention": {"plugins": ["attention=torch_reference"]},
}
EOS = (1, 3)  # of the byte tokenizer and the generation config; ignore_eos keeps them from being drawn
MAX_LEN = 100
NEW_TOKENS = 24
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


def make_prompts() -> list[list[int]]:
    """Lengths around multiples of the block size 4, from 2 to 75 tokens; two share a prefix, two are equal."""
    rng = random.Random(3)
    prompts = [[rng.randrange(4, 276) for _ in range(n)] for n in (2, 3, 4, 5, 8, 15, 16, 17, 31, 40, 60, 75)]
    return [*prompts, prompts[9][:20] + prompts[5], list(prompts[10])]


def run(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS, use_tqdm=False)
    llm.check_integrity()
    return [o.outputs[0].token_ids for o in outputs]


def make_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        max_model_len=MAX_LEN,
        block_size=4,
        **{"num_gpu_blocks_override": 500, **settings},
    )


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, name)
    oracle = transformers_model(folder)
    pin_rope(oracle, MAX_LEN)  # one rotation per process here; transformers changes some with the length of a batch
    prompts = make_prompts()
    with make_llm(folder) as llm:
        alone = [run(llm, [prompt])[0] for prompt in prompts]
    for prompt, output in zip(prompts, alone, strict=True):
        assert len(output) == NEW_TOKENS
        assert greedy_differences(oracle, prompt, output, EOS) == [], f"prompt of {len(prompt)} tokens"
    varied = {tuple(output) for output in alone}
    assert len(varied) > len(prompts) // 2, "the outputs hardly differ: this model tests nothing"
    for mode, settings in MODES.items():
        with make_llm(folder, **settings) as llm:
            assert run(llm, prompts) == alone, mode
            if mode.startswith("tiny pool"):
                assert llm.stats.num_preemptions_recompute > 0, "the pool was not small enough to force a preemption"
            assert run(llm, prompts) == alone, f"{mode}, with prefix hits"
            assert llm.stats.prefix_hits > 0 or mode.startswith("tiny pool")  # which evicts them all
