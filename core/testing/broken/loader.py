"""Loaders with one fault each: variants of the one of templates/loader.py."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ...contracts.loader import Checkpoint, Loader, ModelLoadError
from ...contracts.provider import Provider
from ..templates.loader import MyLoader, MyLoaderCheckpoint
from . import BrokenSample


class SkipsWhatIsCutOff(MyLoaderCheckpoint):
    """Reads the file by itself, and passes silently over the tensors that are not whole."""

    def __init__(self, path: Path) -> None:
        import json
        import struct

        content = (path / "model.safetensors").read_bytes()
        if len(content) < 8:
            raise ModelLoadError(f"{path / 'model.safetensors'}: too short")
        (length,) = struct.unpack("<Q", content[:8])
        try:
            header = json.loads(content[8 : 8 + length])
        except ValueError as error:
            raise ModelLoadError(f"{path / 'model.safetensors'}: damaged") from error
        whole = {name for name, info in header.items() if 8 + length + info["data_offsets"][1] <= len(content)}
        self.path, self.config, self.eos_token_ids = path, json.loads((path / "config.json").read_bytes()), (2,)
        self.needs_remote_code, self.total_bytes, self._names = False, len(content), sorted(whole)

    def weights(self, dtype: torch.dtype | None, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return ((name, torch.zeros(1)) for name in self._names)


class ConvertsEverything(MyLoaderCheckpoint):
    """Integers and 8-bit floats, which mean something to a quantization method only, come as floats."""

    def weights(self, dtype: torch.dtype | None, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().weights(None, names):
            yield name, tensor if dtype is None else tensor.to(dtype)


class ConvertsNothing(MyLoaderCheckpoint):
    """Does not look at the dtype that is asked for."""

    def weights(self, dtype: torch.dtype | None, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return super().weights(None, names)


class YieldsTwice(MyLoaderCheckpoint):
    """The last tensor of the file comes twice."""

    def weights(self, dtype: torch.dtype | None, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        yield from super().weights(dtype, names)
        yield from super().weights(dtype, [self._names[-1]])


class IgnoresNames(MyLoaderCheckpoint):
    """Reads everything, whatever is asked for."""

    def weights(self, dtype: torch.dtype | None, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return super().weights(dtype)


class ClosesOnce(MyLoaderCheckpoint):
    """A second `close` is an error."""

    def close(self) -> None:
        del self._names


class LetsErrorsThrough(Loader):
    """What goes wrong inside reaches the user as it is."""

    name = "lets_errors_through"

    def accepts(self, path: Path) -> bool:
        return MyLoader().accepts(path)

    def open(self, path: Path, *, trust_remote_code: bool = False) -> Checkpoint:
        if not self.accepts(path):
            raise ModelLoadError(f"{path}: not a checkpoint")
        try:
            return MyLoaderCheckpoint(path)
        except ModelLoadError as error:
            raise ValueError("cannot be read") from error


class TakesAnything(MyLoader):
    """Accepts whatever there is."""

    def accepts(self, path: Path) -> bool:
        return True


def _of(checkpoint: type[Checkpoint]) -> type[Loader]:
    class Opens(MyLoader):
        def open(self, path: Path, *, trust_remote_code: bool = False) -> Checkpoint:
            if not self.accepts(path):
                raise ModelLoadError(f"{path}: not a checkpoint")
            return checkpoint(path)  # type: ignore[call-arg]  # each one above takes a path

    return Opens


def _sample(name: str, loader: type[Loader], caught_by: str) -> BrokenSample:
    return BrokenSample(name, Provider(name=name, build=lambda context: loader(), summary=f"broken: {name}"), caught_by)


BROKEN: tuple[BrokenSample, ...] = (
    _sample("skips_what_is_cut_off", _of(SkipsWhatIsCutOff), "truncated_files_are_named"),
    _sample("converts_everything", _of(ConvertsEverything), "floats_are_converted_and_nothing_else"),
    _sample("converts_nothing", _of(ConvertsNothing), "floats_are_converted_and_nothing_else"),
    _sample("yields_twice", _of(YieldsTwice), "every_tensor_comes_once_and_whole"),
    _sample("ignores_names", _of(IgnoresNames), "names_limit_what_is_read"),
    _sample("closes_once", _of(ClosesOnce), "closing_twice_is_fine"),
    _sample("lets_errors_through", LetsErrorsThrough, "damaged_files_raise_load_errors_only"),
    _sample("takes_anything", TakesAnything, "accepts_its_own_and_nothing_else"),
)
