"""The GGUF container: metadata and tensor directory, read from a mapped file.

Every length, count, dimension and offset in the file is checked against the file's size before anything is allocated or
read by it; any fault is a ModelLoadError. Reading costs memory in proportion to the metadata, never to what it claims.

Layout (version 2 and 3, little-endian): "GGUF", u32 version, u64 tensor count, u64 pair count; the pairs (string key,
u32 type, value); per tensor a string name, u32 n_dims, u64 dims[n_dims], u32 type, u64 offset; padding to the
alignment; data.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hotswap.core.contracts.loader import ModelLoadError

MAGIC = b"GGUF"
MAX_STRING_BYTES = 1 << 20
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_ARRAY_ITEMS = 1 << 22
MAX_NAME_BYTES = 256
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

Scalar = bool | int | float | str
Value = Scalar | list[str] | list[bool] | NDArray[np.generic]
T = TypeVar("T")

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, struct.Struct] = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_ARRAY_DTYPES = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage type: `block_elements` consecutive elements of a row take `block_bytes` bytes."""

    name: str
    block_elements: int
    block_bytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    code: TensorType(name, elements, size)
    for code, name, elements, size in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136), (28, "F64", 1, 8), (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the directory. shape is in HuggingFace's order: outermost first. start: byte offset in the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    start: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return self.num_bytes // self.type.block_bytes * self.type.block_elements


class GGUFFile:
    """An open, checked GGUF file. `metadata` by key; `tensors` by name, in file order."""

    def __init__(self, path: Path) -> None:
        """Raises ModelLoadError naming the file and the fault."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelLoadError(f"{path}: the file is empty") from None
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            reader = _Reader(self._map, path)
            self.metadata, self.tensors = _read_directory(reader)
        except ModelLoadError:
            self._map.close()
            raise

    def raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, uint8 [num_bytes]: a view of the map, to be dropped before `close`."""
        return np.frombuffer(self._map, np.uint8, info.num_bytes, info.start)

    def close(self) -> None:
        """Unmaps the file. A view that is still alive keeps the map alive until it goes."""
        try:
            self._map.close()
        except BufferError:
            return

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of `key` when it is there.

        Raises ModelLoadError when it is not of `kind`; an int passes for a float.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelLoadError(f"{self.path}: {key} is {_describe(value)}, expected {kind.__name__}")
        return value


class _Reader:
    """A cursor over the mapped bytes that never leaves them."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.size = len(data)
        self.path = path
        self.position = 0

    def fail(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: damaged GGUF: {what} (at byte {self.position})")

    def number(self, form: struct.Struct) -> int | float | bool:
        end = self.position + form.size
        if end > self.size:
            raise self.fail("the file ends in the middle of its header")
        (value,) = form.unpack_from(self.data, self.position)
        self.position = end
        number: int | float | bool = value
        return number

    def u32(self) -> int:
        return int(self.number(_U32))

    def u64(self) -> int:
        return int(self.number(_U64))

    def string(self, limit: int = MAX_STRING_BYTES) -> str:
        length = self.u64()
        if length > limit or length > self.size - self.position:
            raise self.fail(f"a string claims {length} bytes")
        start, self.position = self.position, self.position + length
        try:
            return self.data[start : self.position].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None

    def strings(self, count: int) -> list[str]:
        """`count` strings in a row. The caller has bounded `count` by the bytes that are left."""
        data, size, position = self.data, self.size, self.position
        unpack = _U64.unpack_from
        out: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack(data, position)
                end = position + 8 + length
                if length > MAX_STRING_BYTES or end > size:
                    self.position = position
                    raise self.fail(f"a string claims {length} bytes")
                out.append(data[position + 8 : end].decode("utf-8"))
                position = end
        except struct.error:
            raise self.fail("the file ends in the middle of an array of strings") from None
        except UnicodeDecodeError:
            self.position = position
            raise self.fail("a string is not UTF-8") from None
        self.position = position
        return out

    def value(self, key: str) -> Value:
        code = self.u32()
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            return self.array(key)
        if code not in _SCALARS:
            raise self.fail(f"{key!r} has the unknown value type {code}")
        return self.number(_SCALARS[code])

    def array(self, key: str) -> Value:
        code, count = self.u32(), self.u64()
        smallest = 8 if code == _STRING else _SCALARS[code].size if code in _SCALARS else 0
        if not smallest:
            raise self.fail(f"{key!r} is an array of the unsupported value type {code}")
        if count > MAX_ARRAY_ITEMS or count * smallest > self.size - self.position:
            raise self.fail(f"the array {key!r} claims {count} items")
        if code == _STRING:
            return self.strings(count)
        start, self.position = self.position, self.position + count * smallest
        data = self.data[start : self.position]
        if code == _BOOL:
            return [byte != 0 for byte in data]
        return np.frombuffer(data, _ARRAY_DTYPES[code])


def _read_directory(reader: _Reader) -> tuple[dict[str, Value], dict[str, TensorInfo]]:
    num_tensors, num_pairs = _read_header(reader)
    metadata: dict[str, Value] = {}
    for _ in range(num_pairs):
        key = reader.string(limit=1 << 16)
        if key in metadata:
            raise reader.fail(f"the key {key!r} occurs twice")
        metadata[key] = reader.value(key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment is {_describe(alignment)}, not a power of two up to {MAX_ALIGNMENT}")
    entries = [_read_tensor_entry(reader) for _ in range(num_tensors)]
    data_start = (reader.position + alignment - 1) // alignment * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in entries:
        if info.name in tensors:
            raise reader.fail(f"the tensor {info.name!r} occurs twice")
        if info.start % alignment:
            raise reader.fail(f"the tensor {info.name!r} is not aligned to {alignment} bytes")
        start = data_start + info.start
        if start + info.num_bytes > reader.size:
            raise reader.fail(
                f"the tensor {info.name!r} ends {start + info.num_bytes - reader.size} bytes after the file does"
            )
        tensors[info.name] = TensorInfo(info.name, info.shape, info.type, start, info.num_bytes)
    _refuse_overlaps(reader, list(tensors.values()))
    return metadata, tensors


def _read_header(reader: _Reader) -> tuple[int, int]:
    if reader.data[:4] != MAGIC:
        raise ModelLoadError(f"{reader.path}: not a GGUF file")
    reader.position = 4
    version = reader.u32()
    if version not in (2, 3):
        if version and not version & 0xFFFF:
            raise ModelLoadError(f"{reader.path}: the file is big-endian; only little-endian GGUF can be read")
        raise ModelLoadError(f"{reader.path}: GGUF version {version}; versions 2 and 3 can be read")
    num_tensors, num_pairs = reader.u64(), reader.u64()
    left = reader.size - reader.position
    if num_pairs > MAX_PAIRS or num_pairs * 13 > left:  # key length, type, and a value of one byte
        raise reader.fail(f"it claims {num_pairs} metadata pairs")
    if num_tensors > MAX_TENSORS or num_tensors * 32 > left:  # name length, n_dims, one dim, type, offset
        raise reader.fail(f"it claims {num_tensors} tensors")
    return num_tensors, num_pairs


def _read_tensor_entry(reader: _Reader) -> TensorInfo:
    """One directory entry; `start` is still relative to the data section."""
    name = reader.string(limit=MAX_NAME_BYTES)
    num_dims = reader.u32()
    if not 1 <= num_dims <= MAX_DIMS:
        raise reader.fail(f"the tensor {name!r} has {num_dims} dimensions")
    dims = [reader.u64() for _ in range(num_dims)]
    code, offset = reader.u32(), reader.u64()
    if code not in TENSOR_TYPES:
        raise ModelLoadError(f"{reader.path}: the tensor {name!r} has the unsupported type {code}")
    kind = TENSOR_TYPES[code]
    elements = 1
    for dim in dims:
        elements *= dim
        if not dim > 0 or elements >= 1 << 62:
            raise reader.fail(f"the tensor {name!r} has the dimensions {dims}")
    if dims[0] % kind.block_elements:
        raise reader.fail(
            f"the tensor {name!r} has rows of {dims[0]}, no multiple of {kind.name}'s {kind.block_elements}"
        )
    num_bytes = elements // kind.block_elements * kind.block_bytes
    if offset > reader.size or num_bytes > reader.size:
        raise reader.fail(f"the tensor {name!r} claims {num_bytes} bytes at {offset}, outside the file")
    return TensorInfo(name, tuple(reversed(dims)), kind, offset, num_bytes)


def _refuse_overlaps(reader: _Reader, tensors: list[TensorInfo]) -> None:
    by_start = sorted(tensors, key=lambda info: info.start)
    for left, right in pairwise(by_start):
        if left.start + left.num_bytes > right.start:
            raise reader.fail(f"the tensors {left.name!r} and {right.name!r} overlap")


def _describe(value: object) -> str:
    return f"an array of {len(value)}" if isinstance(value, list | np.ndarray) else f"{str(value)[:60]!r}"
