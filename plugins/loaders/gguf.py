"""Loader `gguf`: one file, or a set of numbered parts, that holds config, tokenizer, template and weights.

Quantized tensors are dequantized on load.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hotswap.core.contracts.loader import Checkpoint, Loader, ModelLoadError, TokenizerSpec

from .gguf_config import TensorRole, architecture_of, config_of, eos_ids_of, generation_config_of, tensor_role
from .gguf_container import MAGIC, GGUFFile, TensorInfo
from .gguf_tokenizer import build_tokenizer_spec
from .parallel import ahead

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_CHUNK_ELEMENTS = 1 << 17  # dequantized at a time: half a MiB of float32, so that it stays in the cache
_COPY_ELEMENTS = 1 << 15  # converted at a time: torch starts its own threads for more, which would fight with ours


class GGUFLoader(Loader):
    """A .gguf file, or a folder that holds one model in that format and no safetensors."""

    name = "gguf"

    def accepts(self, path: Path) -> bool:
        if path.is_dir():
            return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
        try:
            with path.open("rb") as file:
                return file.read(4) == MAGIC
        except OSError:
            return False

    def open(self, path: Path, *, trust_remote_code: bool = False) -> GGUFCheckpoint:
        return GGUFCheckpoint(_parts_of(_single_model(path) if path.is_dir() else path), path)


def _single_model(folder: Path) -> Path:
    """The one model in `folder`; vision projectors (mmproj) and later parts do not count."""
    files = sorted(folder.glob("*.gguf"))
    models = [file for file in files if not file.name.startswith("mmproj") and _part_number(file) in (None, 1)]
    if len(models) != 1:
        names = ", ".join(file.name for file in models or files)
        raise ModelLoadError(f"{folder}: holds {len(models)} GGUF models ({names}); name one of them")
    return models[0]


def _part_number(file: Path) -> int | None:
    match = _PART.fullmatch(file.name)
    return int(match[2]) if match else None


def _parts_of(path: Path) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if not match:
        return [path]
    count = int(match[3])
    if not 1 <= count <= 4096 or int(match[2]) != 1:
        raise ModelLoadError(f"{path}: name the first part of a split model, the one with 00001-of-{match[3]}")
    parts = [path.with_name(f"{match[1]}-{n:05}-of-{match[3]}.gguf") for n in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelLoadError(f"{part}: this part of the model is missing")
    return parts


class GGUFCheckpoint(Checkpoint):
    """Opened from its parts in order; the first holds the metadata."""

    needs_remote_code = False

    def __init__(self, parts: list[Path], path: Path) -> None:
        self.path = path
        self._files: list[GGUFFile] = []
        try:
            for part in parts:
                self._files.append(GGUFFile(part))
            self._read()
        except ModelLoadError:
            self.close()
            raise

    def _read(self) -> None:
        main = self._files[0]
        _, architecture = architecture_of(main)
        self.config = config_of(main)
        self.generation_config = generation_config_of(main)
        self.chat_template = main.get("tokenizer.chat_template", str)
        self.eos_token_ids = eos_ids_of(main)
        if len(self.eos_token_ids) > 1:
            self.generation_config["eos_token_id"] = list(self.eos_token_ids)
        self._entries: dict[str, tuple[GGUFFile, TensorInfo, TensorRole]] = {}
        for file in self._files:
            for info in file.tensors.values():
                role = tensor_role(info.name, architecture)
                if role is None:
                    continue
                if role.name in self._entries:
                    raise ModelLoadError(f"{file.path}: the tensor {info.name!r} occurs twice")
                self._entries[role.name] = (file, info, role)
        self.total_bytes = sum(info.num_bytes for _, info, _ in self._entries.values())

    def tokenizer_spec(self) -> TokenizerSpec | None:
        return build_tokenizer_spec(self._files[0])

    def weight_names(self) -> list[str]:
        return list(self._entries)

    def weights(self, dtype: torch.dtype | None, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor is floating point here.

        With dtype None, F32 and F64 come as float32, F16 and BF16 as they are, and quantized ones as bfloat16.
        """
        import torch  # noqa: F401  # here, not in a thread of the pool, whose start it would delay

        wanted = [name for name in self._entries if names is None or name in names]
        yield from ahead(wanted, lambda name: self._read_one(name, dtype))

    def _read_one(self, name: str, dtype: torch.dtype | None) -> Tensor:
        file, info, role = self._entries[name]
        return read_tensor(file, info, dtype, heads=self._heads(role), offset=role.offset)

    def _heads(self, role: TensorRole) -> int:
        if role.permuted is None:
            return 0
        key = "num_attention_heads" if role.permuted == "q" else "num_key_value_heads"
        heads: int = self.config[key]
        return heads

    def close(self) -> None:
        for file in self._files:
            file.close()


def read_tensor(
    file: GGUFFile, info: TensorInfo, dtype: torch.dtype | None, *, heads: int = 0, offset: float = 0.0
) -> Tensor:
    """One tensor, dequantized, as a CPU tensor of its own memory.

    heads: undo the pairing of rotary rows over so many heads; 0 leaves the rows. offset: subtracted from every value.
    """
    import torch

    rows = file.raw(info).reshape(info.shape[0] if len(info.shape) > 1 or heads else 1, -1)
    if heads:
        rows = _unpair_rows(rows, heads, info, file)
    stored = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(info.type.name)
    if stored is not None:
        plain = torch.from_numpy(np.array(rows, copy=True).reshape(-1)).view(stored)
        if offset:
            plain = plain.float() - offset
        return plain.to(dtype or stored).reshape(info.shape)
    out = torch.empty(info.num_elements, dtype=dtype or (torch.float32 if info.type.name == "F64" else torch.bfloat16))
    _dequantize_into(out, rows.reshape(-1, info.type.block_bytes), info, offset)
    return out.reshape(info.shape)


def _dequantize_into(out: Tensor, blocks: NDArray[np.uint8], info: TensorInfo, offset: float) -> None:
    import torch

    from .gguf_dequant import DEQUANTIZERS
    from .gguf_dequant_iq import IQ_DEQUANTIZERS

    dequantize = DEQUANTIZERS.get(info.type.name) or IQ_DEQUANTIZERS[info.type.name]
    elements = info.type.block_elements
    step = max(1, _CHUNK_ELEMENTS // elements)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be inf or NaN: not this layer's to judge
        for start in range(0, len(blocks), step):
            chunk = dequantize(blocks[start : start + step])
            if offset:
                chunk = chunk - np.float32(offset)
            values = torch.from_numpy(chunk.reshape(-1))
            target = out[start * elements : start * elements + values.numel()]
            for at in range(0, values.numel(), _COPY_ELEMENTS):
                target[at : at + _COPY_ELEMENTS] = values[at : at + _COPY_ELEMENTS]


def _unpair_rows(rows: NDArray[np.uint8], heads: int, info: TensorInfo, file: GGUFFile) -> NDArray[np.uint8]:
    """Row order (head, position in half, half) -> (head, half, position in half)."""
    if rows.shape[0] % (2 * heads):
        raise ModelLoadError(
            f"{file.path}: the tensor {info.name!r} has {rows.shape[0]} rows, no multiple of 2 x {heads} heads"
        )
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape[0], -1)
