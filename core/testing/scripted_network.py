"""The scripted model's forward pass (see scripted_model.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..contracts.attention import AttentionLayer, CacheSpec
from ..contracts.model import ForwardContext, LoadReport, Model, ModelContext, WeightSpec
from .scripted_model import EOS_ID, SEAL, Part, Row, Script

BITS = 16  # of a token id, one a dimension: exact in every dtype of the cache
_SHARPNESS = 40.0  # twice of it apart, exp() of the difference vanishes beside 1
LAYER = AttentionLayer(index=0, num_heads=1, num_kv_heads=1, head_dim_k=BITS, head_dim_v=BITS, scale=1.0)


class _Unlearned(Model):
    """What has nothing to load but the seal."""

    def __init__(self, context: ModelContext) -> None:
        self._width = int(context.hf_config["vocab_size"])
        self._device = context.torch_device

    def cache_specs(self) -> Sequence[CacheSpec]:
        return [CacheSpec("full", 1, BITS, BITS, "float32")]

    def attention_layers(self) -> Sequence[AttentionLayer]:
        return [LAYER]

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield WeightSpec(SEAL, (1,))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        return LoadReport(unexpected=[name for name, _ in weights if name != SEAL])


class ScriptedModel(_Unlearned):
    """Hidden rows are the bits of the request's first token, then the position.

    Every key says whether its token is the first; every query looks for it; the value is the token. So what comes out
    of attention is the first token of whatever the block table leads to.
    """

    supports_graphs = False  # the script is looked up on the host

    def __init__(self, context: ModelContext, script: Script) -> None:
        super().__init__(context)
        self._script = script
        self._parts = {int(key): part for key, part in script.parts.items()}
        self._dtype: torch.dtype = getattr(torch, script.dtype)
        eos = context.hf_config.get("eos_token_id", EOS_ID)
        self._end: Row = int(eos[0] if isinstance(eos, list) else eos)
        self._places = torch.arange(BITS, device=self._device)

    def embed(self, token_ids: Tensor) -> Tensor:
        return ((token_ids.unsqueeze(1) >> self._places) & 1).to(torch.float32)

    def forward(
        self, embeds: Tensor, positions: Tensor, context: ForwardContext, intermediates: dict[str, Tensor] | None = None
    ) -> Tensor:
        count = len(embeds)
        query = torch.zeros((count, 1, BITS), device=self._device)
        query[:, 0, 0] = 1.0
        key = torch.zeros_like(query)
        key[:, 0, 0] = torch.where(positions == 0, _SHARPNESS, -_SHARPNESS)
        first = context.attend(LAYER, query, key, embeds.view(count, 1, BITS)).view(count, BITS)
        return torch.cat((first, positions.unsqueeze(1).to(torch.float32)), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Raises RuntimeError when the cache did not give a first token back."""
        bits = hidden[:, :BITS]
        if not bool(((bits - bits.round()).abs() < 1e-3).all() and (bits.round().clamp(0, 1) == bits.round()).all()):
            raise RuntimeError(f"the KV cache does not hold these requests' first tokens: {bits.tolist()}")
        ids = (bits.round().to(torch.int64) << self._places).sum(1).tolist()
        rows = [
            self._row(self._parts.get(token_id, self._script.default), int(position))
            for token_id, position in zip(ids, hidden[:, BITS].tolist(), strict=True)
        ]
        return torch.stack(rows).to(self._dtype).to(torch.float32)

    def _row(self, part: Part, position: int) -> Tensor:
        """The logits after `position`: flat within the prompt, which the script says nothing about."""
        index = position + 1 - (part.prompt_tokens or self._script.prompt_tokens)
        row = torch.zeros(self._width, device=self._device)
        if index < 0:
            return row
        said: Row = part.rows[index] if index < len(part.rows) else self._end
        if isinstance(said, int):
            row[said] = self._script.margin
            return row
        row.fill_(said.get("base", 0.0))
        for token_id, value in said.items():
            if token_id != "base":
                row[int(token_id)] = value
        return row


class InstantModel(_Unlearned):
    """One token for ever. Nothing is computed, so what is measured is everything else."""

    def __init__(self, context: ModelContext, token_id: int) -> None:
        super().__init__(context)
        self._row = torch.zeros((1, self._width), device=self._device)
        self._row[0, token_id] = 100.0

    def embed(self, token_ids: Tensor) -> Tensor:
        return token_ids.unsqueeze(1)

    def forward(
        self, embeds: Tensor, positions: Tensor, context: ForwardContext, intermediates: dict[str, Tensor] | None = None
    ) -> Tensor:
        return embeds

    def logits(self, hidden: Tensor) -> Tensor:
        return self._row.repeat(len(hidden), 1)  # not a view: the sampler may edit rows in place
