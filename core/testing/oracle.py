"""The slow, obvious truth: greedy decoding by transformers, without cache or batch, to compare an engine with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..contracts.loader import Checkpoint


def transformers_model(path: Path, checkpoint: Checkpoint | None = None) -> Any:
    """transformers' model of a checkpoint, float32, in eval mode.

    A folder is read by transformers itself. For a GGUF file the tensors come from `checkpoint` (our reader, which other tests
    compare with the gguf package), since transformers needs half a minute to read one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if path.is_dir():
        # Eager: under sdpa some versions of transformers drop Gemma 2's soft cap.
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    if checkpoint is None:
        checkpoint = _open(path)
    settings = dict(checkpoint.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(dict(checkpoint.weights(torch.float32)), strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise ValueError(f"the weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.eval()


def _open(path: Path) -> Checkpoint:
    import importlib

    # By name: the core imports no plugin, and this helper is used by tests only.
    loader = importlib.import_module("hotswap.plugins.loaders.gguf").GGUFLoader()
    opened: Checkpoint = loader.open(path)
    return opened


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an output leaves the greedy path. gap: how far (in logits) its token is below the oracle's best."""

    position: int
    token_id: int
    expected: int
    gap: float


def greedy_differences(
    model: Any, prompt: Sequence[int], output: Sequence[int], banned: Sequence[int] = ()
) -> list[Difference]:
    """Checks a greedy continuation in one forward over prompt + output.

    banned: tokens that could not be drawn (end of sequence under ignore_eos, as under transformers' min_new_tokens).

    If the oracle's argmax equals the output at every position, its own greedy decoding gives exactly this output, by
    induction over positions; so one forward replaces a whole `generate`.
    """
    import torch

    ids = torch.tensor([[*prompt, *output]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logits[:, list(banned)] = float("-inf")
    best = logits.argmax(-1).tolist()
    found = []
    for position, (token_id, expected) in enumerate(zip(output, best, strict=True)):
        if token_id != expected:
            gap = float(logits[position, expected] - logits[position, token_id])
            found.append(Difference(position, token_id, expected, gap))
    return found
