"""The whole engine on the card: exactness against transformers, graphs against eager, determinism, and no waiting.

Real weights are SmolLM2-135M's, float32 unless a test says otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hotswap import LLM, SamplingParams
from hotswap.core.outputs import RequestOutput
from hotswap.core.testing.oracle import greedy_differences
from hotswap.core.testing.tiny_models import make_tiny_model

EOS = (2,)
NEW_TOKENS = 48
# bfloat16 has 8 bits of mantissa and the model 30 layers: what its log-probabilities may be off float32's.
BF16_MEAN, BF16_MOST = 0.06, 1.0


def make_prompts(vocab: int = 49000, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [2, 3, 15, 16, 17, 31, 33, 64, 100, 128, 129, 255, 256, 400, 640, 900]
    return [[rng.randrange(20, vocab) for _ in range(length)] for length in lengths]


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    llm.check_integrity()
    return outputs


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **changes})


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def make_llm(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), **{"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 2**32, **settings})


@pytest.fixture(scope="module")
def alone(smollm2_path: Path) -> Iterator[list[list[int]]]:
    """What each prompt gives when it is served alone."""
    with make_llm(smollm2_path, enable_prefix_caching=False) as llm:
        yield [tokens_of(generate(llm, [prompt], greedy()))[0] for prompt in make_prompts()]


def test_greedy_float32_equals_transformers(alone: list[list[int]], smollm2_oracle: Any) -> None:
    for prompt, output in zip(make_prompts(), alone, strict=True):
        assert len(output) == NEW_TOKENS
        assert greedy_differences(smollm2_oracle, prompt, output, EOS) == [], f"prompt of {len(prompt)} tokens"


MODES: dict[str, dict[str, Any]] = {
    "together": {},
    "eager": {"enforce_eager": True},
    "hardly any graphs": {"max_graph_tokens": 1},
    "synchronous": {"async_scheduling": False},
    "small chunks": {"max_num_batched_tokens": 48},
    "deterministic": {"deterministic": True},
    "preemption": {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 90, "max_num_batched_tokens": 256},
    "reference attention": {"plugins": ["attention=torch_reference"]},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_tokens(mode: str, alone: list[list[int]], smollm2_path: Path) -> None:
    with make_llm(smollm2_path, **MODES[mode]) as llm:
        assert tokens_of(generate(llm, make_prompts(), greedy())) == alone
        if mode == "preemption":
            assert llm.stats.num_preemptions_recompute > 0
        if mode == "together":  # all of it is in the prefix cache now
            assert tokens_of(generate(llm, make_prompts(), greedy())) == alone


def test_bfloat16_logits_are_near_float32(smollm2_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    prompts = make_prompts()[4:12]
    found = []
    for dtype in ("float32", "bfloat16"):
        with make_llm(smollm2_path, dtype=dtype) as llm:
            outputs = generate(llm, prompts, params)
            entries = [next(iter(e.values())).logprob for o in outputs for e in (o.prompt_logprobs or [])[1:] if e]
            found.append(torch.tensor(entries, dtype=torch.float64))
    off = (found[0] - found[1]).abs()
    print(f"bfloat16 against float32, {len(off)} prompt tokens: mean {off.mean():.4f}, most {off.max():.4f}")
    assert off.mean() < BF16_MEAN and off.max() < BF16_MOST


def test_sampled_tokens_do_not_depend_on_the_batch(smollm2_path: Path) -> None:
    """Same seed and position, same noise. In float32, where the batch moves logits by roundoff only, the same tokens."""
    prompts = make_prompts()[:10]
    params = [greedy(temperature=0.9, top_p=0.9, top_k=50, seed=n) for n in range(len(prompts))]
    with make_llm(smollm2_path) as llm:
        together = tokens_of(generate(llm, prompts, params))
        assert [tokens_of(generate(llm, [p], q))[0] for p, q in zip(prompts, params, strict=True)] == together


def test_deterministic_gives_the_same_bits_whatever_the_batch(smollm2_path: Path) -> None:
    """bfloat16: tokens and log-probabilities of a request are equal alone, together, in chunks, and from the prefix cache."""
    prompts = make_prompts()
    params = greedy(logprobs=3, max_tokens=24)

    def facts(outputs: list[RequestOutput]) -> list[Any]:
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    with make_llm(smollm2_path, dtype="bfloat16", deterministic=True, enable_prefix_caching=False) as llm:
        truth = [facts(generate(llm, [prompt], params))[0] for prompt in prompts]
        assert facts(generate(llm, prompts, params)) == truth
        assert facts(generate(llm, list(reversed(prompts)), params)) == list(reversed(truth))
    with make_llm(smollm2_path, dtype="bfloat16", deterministic=True, max_num_batched_tokens=80) as llm:
        assert facts(generate(llm, prompts, params)) == truth
        assert facts(generate(llm, prompts, params)) == truth  # prefix hits


def test_steps_never_wait_for_the_device(smollm2_path: Path) -> None:
    """Under torch's debug mode an operation that waits raises. What waits on purpose is the event of a result."""
    kinds = [
        greedy(),
        greedy(temperature=0.8, seed=1),
        greedy(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=2),
        greedy(repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1),
        greedy(logprobs=5, prompt_logprobs=2),
        greedy(logit_bias={5: 2.0}, min_tokens=4, bad_words=["the end"], ignore_eos=False),
        greedy(allowed_token_ids=list(range(100, 400))),
    ]
    prompts = make_prompts()
    with make_llm(smollm2_path) as llm:
        params = [kinds[n % len(kinds)] for n in range(len(prompts))]
        first = tokens_of(generate(llm, prompts, params))  # compiles what was not compiled yet
        llm.reset_prefix_cache()
        step = llm._engine.core.step
        llm._engine.core.step = watched(step)  # type: ignore[method-assign]
        assert tokens_of(generate(llm, prompts, params)) == first


def watched(step: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "gpt-neox"])
def test_tiny_models_equal_the_cpu(name: str, tmp_path: Path) -> None:
    """Windows, soft caps, norms of heads, partial rotations, and the transformers fallback."""
    make_tiny_model(tmp_path, name)
    prompts = [[n % 90 + 5 for n in range(length)] for length in (1, 7, 30, 61)]
    params = greedy(max_tokens=12)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 128}
    with LLM(str(tmp_path), plugins=["platform=cpu"], **settings) as llm:
        wanted = tokens_of(generate(llm, prompts, params))
    with LLM(str(tmp_path), kv_cache_memory_bytes=2**28, **settings) as llm:
        assert tokens_of(generate(llm, prompts, params)) == wanted
