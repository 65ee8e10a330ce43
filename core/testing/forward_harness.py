"""Runs a model over paged caches step by step, without an engine: prefill in chunks, then greedy decode.
 It is the smallest thing that fulfils a model's side of the contract, for testing models and attention backends.
Blocks are handed out in shuffled order, so that code that reads past a block or assumes neighbours fails.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..clock import SystemClock
from ..config import EngineConfig
from ..contracts.attention import AttentionBackend, AttentionLayer, BatchGeometry, LayerCache
from ..contracts.model import Model, ModelContext
from ..contracts.provider import DeviceInfo
from ..contracts.quantization import QuantizationContext, QuantizationMethod
from ..layers.ops import OpTable


def quantization_context(
    *,
    ops: OpTable | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    config: EngineConfig | None = None,
) -> QuantizationContext:
    """What the `build` of a quantization method gets, outside an engine."""
    ops = ops or OpTable.reference()
    return QuantizationContext(
        options=None,
        config=config or EngineConfig.from_flat(),
        device=DeviceInfo(kind=device.partition(":")[0], name="test"),
        clock=SystemClock(),
        linear=ops.linear,
        torch_device=device,
        torch_dtype=dtype,
    )


def model_context(
    hf_config: dict[str, Any],
    quantization: QuantizationMethod,
    *,
    ops: OpTable | None = None,
    dtype: torch.dtype = torch.float32,
    activation_dtype: torch.dtype | None = None,
    device: str = "cpu",
    max_model_len: int = 256,
    model_path: str = "",
    config: EngineConfig | None = None,
) -> ModelContext:
    """What the `build` of a model gets, outside an engine."""
    return ModelContext(
        options=None,
        config=config or EngineConfig.from_flat(),
        device=DeviceInfo(kind=device.partition(":")[0], name="test"),
        clock=SystemClock(),
        hf_config=hf_config,
        ops=ops or OpTable.reference(),
        quantization=quantization,
        torch_dtype=dtype,
        activation_dtype=activation_dtype,
        torch_device=device,
        max_model_len=max_model_len,
        model_path=model_path,
    )


def read_safetensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a folder's .safetensors files, in name order. For small test checkpoints."""
    from safetensors.torch import load_file

    for path in sorted(Path(folder).glob("*.safetensors")):
        yield from load_file(path).items()


@dataclass(slots=True)
class _Sequence:
    """One request: its tokens, how many of them are in the cache, and the blocks that it holds."""

    tokens: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


class ForwardHarness:
    """A model, one attention backend and caches for `num_blocks` usable blocks. Also the ForwardContext of its
    steps."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        device: str = "cpu",
        seed: int = 0,
        ops: OpTable | None = None,
    ) -> None:
        self.model = model
        self._rope = (ops or OpTable.reference()).rope
        self.backend = backend
        self._block_size = block_size
        self._device = device
        self._free = list(range(1, num_blocks + 1))  # block 0 is the null block
        random.Random(seed).shuffle(self._free)
        self.caches: list[LayerCache] = []
        for spec in model.cache_specs():
            key_shape, value_shape = backend.layout.shapes(spec, num_blocks + 1, block_size)
            dtype = getattr(torch, spec.dtype)
            # NaN: whatever reads a slot that was never written shows up in the result.
            self.caches.append(
                (
                    torch.full(key_shape, float("nan"), dtype=dtype, device=device),
                    torch.full(value_shape, float("nan"), dtype=dtype, device=device),
                )
            )

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor | None = None,
        cos_sin: Tensor | None = None,
    ) -> Tensor:
        """The ForwardContext's method."""
        if positions is not None and cos_sin is not None:
            self._rope(query, key, positions, cos_sin)
        cache = self.caches[layer.index]
        self.backend.write_kv(key, value, cache)
        return self.backend.forward(query, cache, layer)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], chunk_size: int | None = None) -> Tensor:
        """float32 [len(token_ids), V] for one prompt, computed in chunks."""
        sequence = _Sequence(list(token_ids))
        rows = []
        while sequence.num_computed < len(sequence.tokens):
            count = min(chunk_size or len(sequence.tokens), len(sequence.tokens) - sequence.num_computed)
            rows.append(self.model.logits(self._step([(sequence, count)])))
        self._release(sequence)
        return torch.cat(rows)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, chunk_size: int | None = None
    ) -> list[list[int]]:
        """Greedy continuations, all prompts in one batch. Prompts longer than a chunk take several steps, beside the
        decodes."""
        sequences = [_Sequence(list(prompt)) for prompt in prompts]
        goals = [len(prompt) + max_tokens for prompt in prompts]
        while running := [s for s, goal in zip(sequences, goals, strict=True) if len(s.tokens) < goal]:
            batch = [(s, min(chunk_size or len(s.tokens), len(s.tokens) - s.num_computed)) for s in running]
            ends = torch.tensor([count for _, count in batch]).cumsum(0) - 1
            hidden = self._step(batch, ends.to(self._device))
            chosen = self.model.logits(hidden).argmax(dim=-1).tolist()
            for (sequence, _), token in zip(batch, chosen, strict=True):
                if sequence.num_computed == len(sequence.tokens):
                    sequence.tokens.append(token)
        for sequence in sequences:
            self._release(sequence)
        return [s.tokens[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]

    def _step(self, batch: Sequence[tuple[_Sequence, int]], rows: Tensor | None = None) -> Tensor:
        """Computes the next `count` tokens of each sequence; hidden [T, H], or of the tokens `rows` alone."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, count in batch:
            self._grow(sequence, sequence.num_computed + count)
            for position in range(sequence.num_computed, sequence.num_computed + count):
                token_ids.append(sequence.tokens[position])
                positions.append(position)
                block = sequence.blocks[position // self._block_size]
                slots.append(block * self._block_size + position % self._block_size)
            sequence.num_computed += count
        self.backend.prepare(self._geometry(batch, slots))
        embeds = self.model.embed(torch.tensor(token_ids, device=self._device))
        at = torch.tensor(positions, device=self._device)
        return self.model.forward(embeds, at, self) if rows is None else self.model.forward_rows(embeds, at, self, rows)

    def _geometry(self, batch: Sequence[tuple[_Sequence, int]], slots: list[int]) -> BatchGeometry:
        counts = [count for _, count in batch]
        seq_lens = [sequence.num_computed for sequence, _ in batch]
        width = max(len(sequence.blocks) for sequence, _ in batch)
        tables = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence, _ in batch]
        starts = [sum(counts[:index]) for index in range(len(counts) + 1)]

        def int32(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        return BatchGeometry(
            query_start_loc=int32(starts),
            seq_lens=int32(seq_lens),
            block_table=int32(tables),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self._device),
            num_tokens=len(slots),
            num_requests=len(batch),
            max_query_len=max(counts),
            max_seq_len=max(seq_lens),
            block_size=self._block_size,
        )

    def _grow(self, sequence: _Sequence, num_tokens: int) -> None:
        while len(sequence.blocks) * self._block_size < num_tokens:
            sequence.blocks.append(self._free.pop())

    def _release(self, sequence: _Sequence) -> None:
        self._free.extend(sequence.blocks)
        sequence.blocks.clear()
