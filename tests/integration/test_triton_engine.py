"""The whole engine over the kernels that a GPU gets, interpreted: the same tokens as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotswap import LLM, SamplingParams
from hotswap.core.testing.tiny_models import make_tiny_model
from hotswap.core.testing.triton_interpreter import repair_loops

repair_loops()

PLATFORM = str(Path(__file__).parents[1] / "support" / "interpreted_gpu.py")
PROMPTS = [[5, 9, 33, 70, 12], [81, 4], [60 + i % 30 for i in range(37)]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=6, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_model(path, "llama", head_dim=16)
    return path


def outputs(folder: Path, plugins: list[str]) -> list[tuple[list[int], object]]:
    llm = LLM(
        str(folder), plugins=plugins, dtype="float32", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32
    )
    with llm:
        active = {
            row["kind"] + "/" + (row.get("op") or ""): row["name"]
            for row in llm.info.inventory
            if row["state"] == "active"
        }
        if plugins:
            assert active["platform/"] == "interpreted_gpu" and active["attention/"] == "triton_paged"
            assert active["executor/"] == "inline"
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [(o.outputs[0].token_ids, o.prompt_logprobs) for o in llm.generate(prompts, PARAMS, use_tqdm=False)]


def test_the_kernels_of_a_gpu_give_the_same_tokens(folder: Path) -> None:
    interpreted, plain = outputs(folder, [PLATFORM]), outputs(folder, [])
    assert [tokens for tokens, _ in interpreted] == [tokens for tokens, _ in plain]
