"""Loader `my_loader`: a folder with a config.json and one file of weights, `model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hotswap.core.contracts import Checkpoint, Loader, LoaderContext, ModelLoadError, Provider, TokenizerSpec, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class MyLoader(Loader):
    name = "my_loader"

    def accepts(self, path: Path) -> bool:
        return (path / "config.json").is_file() and (path / "model.safetensors").is_file()

    def open(self, path: Path, *, trust_remote_code: bool = False) -> Checkpoint:
        if not self.accepts(path):
            raise ModelLoadError(f"{path}: must be a folder with config.json and model.safetensors")
        return MyLoaderCheckpoint(path)


class MyLoaderCheckpoint(Checkpoint):
    """Opened for its metadata; the weights are mapped anew for each reading, so nothing stays open."""

    generation_config = {}
    chat_template = None

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        self._file = path / "model.safetensors"
        try:
            self.config = json.loads((path / "config.json").read_bytes())
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{path / 'config.json'}: not valid JSON: {error}") from error
        if not isinstance(self.config, dict):
            raise ModelLoadError(f"{path / 'config.json'}: must hold a JSON object")
        eos = self.config.get("eos_token_id")
        self.eos_token_ids = tuple(sorted(i for i in (eos if isinstance(eos, list) else [eos]) if type(i) is int))
        self.needs_remote_code = "auto_map" in self.config
        self.total_bytes = self._file.stat().st_size
        try:
            with safe_open(self._file, framework="np") as file:  # checks that the file is as long as it says
                self._names = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{self._file}: {error}") from error

    def tokenizer_spec(self) -> TokenizerSpec | None:
        file = self.path / "tokenizer.json"
        return TokenizerSpec(file.read_bytes()) if file.is_file() else None

    def weight_names(self) -> list[str]:
        return list(self._names)

    def weights(self, dtype: torch.dtype | None, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._file, framework="pt") as file:
                for name in self._names:
                    if names is None or name in names:
                        tensor = file.get_tensor(name)
                        plain = tensor.is_floating_point() and tensor.element_size() >= 2
                        yield name, tensor.to(dtype) if plain and dtype is not None else tensor
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{self._file}: {error}") from error

    def close(self) -> None:
        """Nothing is open."""


def build(context: LoaderContext) -> Loader:
    return MyLoader()


@hookimpl
def hotswap_loader() -> Iterator[Provider[Loader]]:
    yield Provider(name="my_loader", build=build, summary="A folder with config.json and model.safetensors.")
