"""Where the offline engine takes its tokenizer from, and how it reads prompts."""

from __future__ import annotations

from pathlib import Path

from hotswap import LLM, SamplingParams
from hotswap.core.testing.tiny_models import make_tiny_model, save_byte_tokenizer


def test_the_tokenizer_may_come_from_a_folder_without_weights(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", tokenizer=False)
    (tmp_path / "tokenizer").mkdir()
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer")
    with LLM(str(model), tokenizer=str(tokenizer), num_gpu_blocks_override=20, max_model_len=64) as llm:
        (output,) = llm.generate("the", SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
        assert output.prompt_token_ids == llm.get_tokenizer().encode("the")
        assert output.outputs[0].token_ids


def test_offline_prompts_may_hold_special_tokens(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    with LLM(str(model), num_gpu_blocks_override=20, max_model_len=64) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        (output,) = llm.generate("<|im_start|>user", params, use_tqdm=False)
        assert output.prompt_token_ids[0] == llm.get_tokenizer().token_id("<|im_start|>")
