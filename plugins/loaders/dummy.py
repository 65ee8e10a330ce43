"""Loader `dummy`: a real checkpoint's config and tokenizer with made-up weights, for measuring and testing."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hotswap.core.contracts.loader import Checkpoint, Loader, ModelLoadError, TokenizerSpec, WeightSpec

from .hf_folder import MetadataCheckpoint
from .parallel import ahead

if TYPE_CHECKING:
    import torch
    from torch import Tensor

AMPLITUDE = 1e-3
_CHUNK_ELEMENTS = 1 << 18


class DummyLoader(Loader):
    """Never chosen by itself: the operator names it (`--load-format dummy`). `loaders` open what the path really is."""

    name = "dummy"

    def __init__(self, loaders: Sequence[Loader] = ()) -> None:
        """loaders: the formats to try for a path that holds weights; a folder with config.json alone needs none."""
        self._loaders = tuple(loaders)

    def accepts(self, path: Path) -> bool:
        return (path.is_dir() and (path / "config.json").is_file()) or any(
            loader.accepts(path) for loader in self._loaders
        )

    def open(self, path: Path, *, trust_remote_code: bool = False) -> DummyCheckpoint:
        if path.is_dir() and (path / "config.json").is_file():
            return DummyCheckpoint(MetadataCheckpoint(path))
        for loader in self._loaders:
            if loader.accepts(path):
                return DummyCheckpoint(loader.open(path, trust_remote_code=trust_remote_code))
        raise ModelLoadError(f"{path}: has neither a config.json nor a checkpoint to take the config from")


class DummyCheckpoint(Checkpoint):
    """The metadata of `real`, and weights made for whatever the model expects."""

    def __init__(self, real: Checkpoint) -> None:
        self._real = real
        self.path = real.path
        self.config = real.config
        self.generation_config = real.generation_config
        self.chat_template = real.chat_template
        self.eos_token_ids = real.eos_token_ids
        self.needs_remote_code = real.needs_remote_code
        self.total_bytes = 0

    def tokenizer_spec(self) -> TokenizerSpec | None:
        return self._real.tokenizer_spec()

    def weight_names(self) -> list[str]:
        """Empty: what tensors there are is the model's to say. Use `weights_for`."""
        return []

    def weights(self, dtype: torch.dtype | None, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        raise ModelLoadError("dummy weights are made from the model's weight specs: use weights_for")

    def weights_for(
        self, specs: Iterable[WeightSpec], dtype: torch.dtype, seed: int, device: str = "cpu"
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor on `device`) for each spec, in order.

        Values are uniform in +-1e-3 and depend on the tensor's name, the seed and the kind of device only. They are
        made on the device in the target dtype: no host copy.
        """
        import torch

        specs = [spec for spec in specs if not spec.redundant]
        if torch.device(device).type == "cpu":
            table = torch.linspace(-AMPLITUDE, AMPLITUDE, 1 << 16, dtype=torch.float32).to(dtype)
            for spec, tensor in ahead(specs, lambda spec: _drawn(spec, table, _seed_of(spec.name, seed))):
                yield spec.name, tensor
            return
        generator = torch.Generator(device=device)
        for spec in specs:
            generator.manual_seed(_seed_of(spec.name, seed))
            tensor = torch.empty(spec.shape, dtype=dtype, device=device)
            yield spec.name, tensor.uniform_(-AMPLITUDE, AMPLITUDE, generator=generator)

    def close(self) -> None:
        self._real.close()


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def _drawn(spec: WeightSpec, table: Tensor, seed: int) -> Tensor:
    """Entries of `table` (65,536 of them) picked by 16 random bits each: several times faster than drawing floats."""
    import torch

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[table.element_size()]
    tensor = torch.empty(spec.shape, dtype=table.dtype)
    flat = tensor.view(bits).reshape(-1).numpy()
    values = table.view(bits).numpy()
    source = np.random.SFC64(seed)
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        part = flat[start : start + _CHUNK_ELEMENTS]
        picks = source.random_raw((part.size + 3) // 4).view(np.uint16)[: part.size]
        np.take(values, picks, out=part, mode="clip")
    return tensor
