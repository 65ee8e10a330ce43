"""The scripted model: what it says, and that it sees when the cache lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hotswap import LLM, SamplingParams
from hotswap.core.contracts.model import ModelContext
from hotswap.core.errors import PluginError
from hotswap.core.testing.scripted_model import EOS_ID, PLUGIN, Part, Script, make_scripted_model
from hotswap.core.testing.scripted_network import BITS, ScriptedModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    engines: list[LLM] = []

    def make(*parts: Any, plugin: str = PLUGIN, **model: Any) -> LLM:
        folder = make_scripted_model(tmp_path / str(len(engines)), *parts, **model)
        settings = {"block_size": 4, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 5}
        engines.append(LLM(str(folder), plugins=[plugin], **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def test_each_request_says_its_own_part(start: Callable[..., LLM]) -> None:
    """By the first prompt token, after the prompt, in chunks; others say the default; then end of sequence."""
    parts = {"A": "one", 70: Part(rows=[80, {"base": 1.0, "81": 2.0, "90": 2.0}], prompt_tokens=13)}
    llm = start(parts, default=[77], prompt_tokens=3)
    prompts: list[Any] = ["Axy", [70] + [99] * 12, [5, 6, 7]]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].text == "one"
    assert [o.outputs[0].token_ids[-1] for o in outputs] == [EOS_ID] * 3
    assert outputs[1].outputs[0].token_ids == [80, 81, EOS_ID]
    assert outputs[2].outputs[0].token_ids == [77, EOS_ID]


def test_the_script_may_come_with_the_option(start: Callable[..., LLM], tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(Script(parts={"70": Part(rows=[91, {"base": float("-inf"), "92": 0.0}])}).model_dump_json())
    llm = start({70: [80]}, plugin=f"{PLUGIN},script={path}")
    assert llm.generate([[70]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == [91, 92, EOS_ID]
    llm = start({70: [80]}, plugin=PLUGIN + ',script={"parts":{"70":{"rows":[93]}}}')
    assert llm.generate([[70]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == [93, EOS_ID]
    with pytest.raises(PluginError, match="no option 'skript'"):
        start({}, plugin=f"{PLUGIN},skript=x")


def test_instant_says_one_token(start: Callable[..., LLM]) -> None:
    llm = start({}, plugin=f"{PLUGIN},instant=68")
    bias = SamplingParams(temperature=0.0, max_tokens=8, logit_bias={68: -100.0})
    outputs = llm.generate(["hello"] * 2, [GREEDY, bias], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == [68] * 8
    assert 68 not in outputs[1].outputs[0].token_ids


def test_a_cache_without_the_first_token_is_noticed() -> None:
    context = SimpleNamespace(hf_config={"vocab_size": 320}, torch_device="cpu")
    model = ScriptedModel(cast(ModelContext, context), Script(parts={"70": Part(rows=[80])}))
    hidden = torch.cat((model.embed(torch.tensor([70])), torch.zeros(1, 1)), 1)
    assert int(model.logits(hidden).argmax()) == 80
    for wrong in (0.5, 2.0, float("nan")):
        spoiled = hidden.clone()
        spoiled[0, BITS - 1] = wrong
        with pytest.raises(RuntimeError, match="does not hold"):
            model.logits(spoiled)
