"""Loader `safetensors`: a HuggingFace folder with one safetensors file or a sharded set with an index."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotswap.core.contracts.loader import Checkpoint, Loader, ModelLoadError, TokenizerSpec, WeightSpec

from .hf_folder import MetadataCheckpoint, read_folder, read_json
from .staging import StoredTensor, Uploader, staged, uploader_for

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_DTYPES = {  # the format's names -> torch's
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64",
}  # fmt: skip

Shard = dict[str, StoredTensor]


class SafetensorsLoader(Loader):
    """A folder with config.json. One that holds only pickled weights is recognised, to be refused with the reason."""

    name = "safetensors"

    def accepts(self, path: Path) -> bool:
        if not path.is_dir():
            return path.suffix in (".bin", ".pt", ".pth", ".safetensors")
        if any(path.glob("*.safetensors")) or (path / INDEX).is_file():
            return True
        described = (path / "config.json").is_file() or (path / "tokenizer.json").is_file()
        return described and not any(path.glob("*.gguf"))

    def open(self, path: Path, *, trust_remote_code: bool = False) -> SafetensorsCheckpoint:
        if not path.is_dir():
            if path.suffix == ".safetensors":
                raise ModelLoadError(f"{path}: name the folder that holds it, with its config.json")
            raise ModelLoadError(_pickle_refusal(path))
        return SafetensorsCheckpoint(path)

    def open_metadata(self, path: Path) -> Checkpoint:
        return MetadataCheckpoint(path, config_needed=False) if path.is_dir() else self.open(path)


class SafetensorsCheckpoint(Checkpoint):
    """Headers are read and checked at opening, so that a damaged file is known before anything else is done."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        metadata = read_folder(folder)
        self.config = metadata.config
        self.generation_config = metadata.generation_config
        self.chat_template = metadata.chat_template
        self.eos_token_ids = metadata.eos_token_ids()
        self.needs_remote_code = metadata.needs_remote_code
        self._metadata = metadata
        self._shards = _read_shards(folder)
        self.total_bytes = sum(tensor.num_bytes for tensor in self.stored_tensors())

    def tokenizer_spec(self) -> TokenizerSpec | None:
        return self._metadata.tokenizer_spec()

    def weight_names(self) -> list[str]:
        return [name for shard in self._shards.values() for name in shard]

    def weights(self, dtype: torch.dtype | None, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError, safe_open

        for path, shard in self._shards.items():
            wanted = [name for name in shard if names is None or name in names]
            if not wanted:
                continue
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name in wanted:
                        yield name, _converted(file.get_tensor(name), dtype)
            except SafetensorError as error:
                raise ModelLoadError(f"{path}: {error}") from error

    def weights_for(
        self, specs: Iterable[WeightSpec], dtype: torch.dtype, seed: int, device: str = "cpu"
    ) -> Iterator[tuple[str, Tensor]]:
        """As `weights`; on a GPU the tensors come to lie there, uploaded while the file is still being read."""
        uploader = uploader_for(device)
        return self.weights(dtype) if uploader is None else self.uploaded(uploader, dtype)

    def uploaded(self, uploader: Uploader, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """As `weights`, through `uploader`; what is converted is converted on its device."""
        with closing(staged(self.stored_tensors(), uploader)) as tensors:
            for name, tensor in tensors:
                yield name, _converted(tensor, dtype)

    def stored_tensors(self) -> list[StoredTensor]:
        """Where every tensor lies, in storage order."""
        return [tensor for shard in self._shards.values() for tensor in shard.values()]

    def close(self) -> None:
        """Nothing stays open between reads."""


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point() or tensor.element_size() < 2:
        return tensor
    return tensor.to(dtype)


def _read_shards(folder: Path) -> dict[Path, Shard]:
    """The tensors of each shard by name, shards in name order, tensors in file order.

    The index decides which files belong to the model; without one, `model.safetensors`, else all shards of the usual
    names, else the only file there is. Files such as consolidated.safetensors are never read beside a model of its own.
    """
    if (folder / INDEX).is_file():
        return _indexed_shards(folder)
    files = [folder / "model.safetensors"]
    if not files[0].is_file():
        files = sorted(path for path in folder.glob("*.safetensors") if _SHARD.fullmatch(path.name))
        if files:
            count = int(files[0].stem.rsplit("-", 1)[1])
            if len(files) != count:
                raise ModelLoadError(f"{folder}: has {len(files)} of {count} shards and no {INDEX}")
    if not files:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelLoadError(_pickle_refusal(folder))
        if len(files) > 1:
            names = ", ".join(path.name for path in files)
            raise ModelLoadError(f"{folder}: cannot tell which of {names} are the model: there is no {INDEX}")
    shards = {path: read_header(path) for path in files}
    _refuse_duplicates(shards)
    return shards


def _indexed_shards(folder: Path) -> dict[Path, Shard]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelLoadError(f"{index}: weight_map must map tensor names to file names")
    shards: dict[Path, Shard] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelLoadError(f"{index}: {name!r} is not the name of a safetensors file in this folder")
        path = folder / name
        if not path.is_file():
            raise ModelLoadError(f"{path}: the index names this file, but it is missing")
        shards[path] = read_header(path)
    for tensor, name in weight_map.items():
        if tensor not in shards[folder / name]:
            raise ModelLoadError(f"{folder / name}: does not hold the tensor {tensor!r} that the index promises")
    _refuse_duplicates(shards)
    return shards


def _refuse_duplicates(shards: dict[Path, Shard]) -> None:
    owner: dict[str, Path] = {}
    for path, shard in shards.items():
        for tensor in shard:
            if tensor in owner:
                raise ModelLoadError(f"{path}: the tensor {tensor!r} is also in {owner[tensor].name}")
            owner[tensor] = path


def read_header(path: Path) -> Shard:
    """The tensors of a safetensors file by name, in file order; checks that the file is as long as it says."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelLoadError(f"{path}: truncated or damaged: its header claims {length} bytes")
            header = json.loads(file.read(length))
        tensors = [_entry(path, name, info, 8 + length) for name, info in header.items() if name != "__metadata__"]
    except struct.error:
        raise ModelLoadError(f"{path}: truncated or damaged: it is {size} bytes long") from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{path}: damaged: its header cannot be read") from error
    expected = max((tensor.start + tensor.num_bytes for tensor in tensors), default=8 + length)
    if size != expected:
        raise ModelLoadError(f"{path}: truncated or damaged: it is {size} bytes long, its header says {expected}")
    in_order = sorted(tensors, key=lambda tensor: (tensor.start, tensor.num_bytes))
    at = 8 + length
    for tensor in in_order:
        if tensor.start != at:
            raise ModelLoadError(
                f"{path}: damaged: the tensor {tensor.name!r} does not begin where the one before ends"
            )
        at += tensor.num_bytes
    return {tensor.name: tensor for tensor in in_order}


def _entry(path: Path, name: str, info: Mapping[str, Any], data_start: int) -> StoredTensor:
    """One line of the header. Raises ValueError, TypeError, KeyError or AttributeError when it is not one."""
    start, end = info["data_offsets"]
    shape = tuple(info["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)) or start > end:
        raise ValueError(f"impossible numbers in the entry of {name!r}")
    stored_type = str(info["dtype"])
    dtype = _DTYPES.get(stored_type, "")
    return StoredTensor(name, path, data_start + start, end - start, shape, dtype, stored_type)


def _pickle_refusal(path: Path) -> str:
    pickles = [path] if path.is_file() else sorted(file for pattern in _PICKLES for file in path.glob(pattern))
    if not pickles:
        return f"{path}: has no weights: neither safetensors nor GGUF files"
    return (
        f"{pickles[0]}: pickled weights can run code when they are opened and are not read. "
        "Use a safetensors or GGUF version of the model, or convert it"
    )
