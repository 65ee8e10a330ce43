"""KV memory is wasted in the tail of each sequence's last block and nowhere else: under 4 % on mix32 at block size 16."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from hotswap import LLM, SamplingParams
from hotswap.core.testing.tiny_models import make_tiny_model

REPOSITORY = Path(__file__).parents[2]


def load_workloads() -> ModuleType:
    spec = importlib.util.spec_from_file_location("workloads", REPOSITORY / "benchmarks" / "workloads.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kv_waste_on_mix32(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", max_position_embeddings=1024)
    prompts, output_lengths = load_workloads().mix32(vocab=320)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lengths]
    wastes = []
    with LLM(str(folder), dtype="float32", max_model_len=1024, num_gpu_blocks_override=2000) as llm:
        core = llm._engine.core
        step = core.step

        def observed() -> object:
            updates = step()
            stats = core.stats()
            if stats.num_running:
                wastes.append(stats.kv_waste)
            return updates

        core.step = observed  # type: ignore[method-assign,assignment]
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        assert core.stats().kv_usage == 0.0
    average = sum(wastes) / len(wastes)
    print(f"KV waste on mix32: {average:.2%} on average over {len(wastes)} steps, at most {max(wastes):.2%}")
    assert len(wastes) > 200
    assert average < 0.04
