"""--debug-poison-freed-blocks: changes no answer, and shows up whoever reads what was not written (S-54)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hotswap import LLM, SamplingParams
from hotswap.core.contracts.attention import CacheSpec, KVLayout
from hotswap.core.runner.kv_cache import group_layers, poison_blocks
from hotswap.core.testing.tiny_models import make_tiny_model

SETTINGS: dict[str, Any] = {"max_model_len": 96, "num_gpu_blocks_override": 14, "block_size": 8, "max_num_seqs": 4}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40, 41, 42], [5, 6, 7, 8, 9, 10, 11, 12, 14, 15], [9] * 17, [3] * 5]
PARAMS = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True, prompt_logprobs=1, logprobs=1)
READS_PAST = """
from hotswap.core.contracts import Provider, hookimpl
from hotswap.plugins.attention.torch_reference.backend import TorchReferenceAttention

class ReadsPast(TorchReferenceAttention):
    def _context(self, stored, request, seq_len):
        return super()._context(stored, request, seq_len + 1)

@hookimpl
def hotswap_attention():
    yield Provider(name="reads_past", build=lambda context: ReadsPast())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def outputs_of(model: str, **settings: Any) -> list[Any]:
    with LLM(model, **{**SETTINGS, **settings}) as llm:
        made = [
            llm.generate(PROMPTS, params, use_tqdm=False) for params in (PARAMS, PARAMS.clone(prompt_logprobs=None))
        ]
        assert llm.stats.num_preemptions_recompute > 0, "blocks must change hands"
        assert llm.stats.prefix_hits > 0
    return [(o.error, o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for run in made for o in run]


@pytest.mark.parametrize("attention", ["paged_cpu", "torch_reference"])
def test_s54_no_answer_changes(model: str, attention: str) -> None:
    plain = outputs_of(model, attention_backend=attention)
    assert outputs_of(model, attention_backend=attention, debug_poison_freed_blocks=True) == plain
    assert all(error is None for error, *_ in plain)


def test_s54_a_backend_that_reads_one_token_too_many_is_found_out(model: str, tmp_path: Path) -> None:
    plugin = tmp_path / "reads_past.py"
    plugin.write_text(READS_PAST)
    found = []
    for poison in (False, True):
        with LLM(model, plugins=[str(plugin)], debug_poison_freed_blocks=poison, **SETTINGS) as llm:
            (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
            found.append(output.error)
    assert found == [None, "the model's logits are not finite (NaN or infinity)"]


def test_only_the_named_blocks_are_poisoned_whatever_the_layout() -> None:
    (group,) = group_layers([CacheSpec("full", 2, 4, 4, "float32")] * 2)
    layout = KVLayout("head_major", ("head", "block", "token", "dim"), ("block", "head", "dim", "token"), ())
    caches = {layer: (torch.zeros(2, 6, 3, 4), torch.zeros(6, 2, 4, 3)) for layer in (0, 1)}
    poison_blocks(group, layout, caches, torch.tensor([1, 4]))
    for key, value in caches.values():
        assert key.isnan().all(dim=3).all(dim=2).all(dim=0).tolist() == [False, True, False, False, True, False]
        assert value.flatten(1).isnan().any(1).tolist() == [False, True, False, False, True, False]
