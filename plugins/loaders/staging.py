"""Stored tensors onto a device at its full speed, through a ring of pinned host buffers.

Threads read the file in pieces of a buffer's size: a read into memory that is there already costs no page fault, and it
lets Python run. Each piece is queued for the device as soon as it is in, in the order of the file, and its buffer is read
into again once the device has passed the copy. So disk or page cache, host and device all work at the same time, and
the host holds the ring and no more, whatever the size of the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from io import FileIO
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hotswap.core.contracts.loader import ModelLoadError

from .parallel import MAX_THREADS, ahead

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUFFER_BYTES = 16 << 20  # copies of this size run at full speed; more would only take longer to pin at every start


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies. dtype: a name of torch's ("bfloat16"), or "" for a type that torch has not, called
    `stored_type` in the file. start: byte offset in the file."""

    name: str
    path: Path
    start: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    stored_type: str


class Fence(Protocol):
    """A point in the device's queue."""

    def synchronize(self) -> None:
        """Waits until the device has passed it. Called in a reading thread, or at the end."""
        ...


class Uploader(Protocol):
    """What staging needs of a device. All but `buffer` and the fences are called in the thread that takes the tensors."""

    def buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of host memory that the device can copy from while the host goes on. Any thread."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory on the device."""
        ...

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Queues the copy. target: uint8 [n] on the device; source: as many bytes of a `buffer`."""
        ...

    def fence(self) -> Fence:
        """The point after all copies so far."""
        ...


class CudaUploader:
    """torch's "cuda" devices, NVIDIA's and AMD's. Copies go into the stream in which the tensors are then used, so whoever
    takes one need not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, num_bytes: int) -> Tensor:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        import torch

        return torch.empty(shape, dtype=dtype, device=self._device)

    def upload(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fence(self) -> Fence:
        import torch

        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def uploader_for(device: str) -> Uploader | None:
    """The way onto `device`; None where tensors of the mapped file serve as well (the CPU), or none is known."""
    import torch

    wanted = torch.device(device)
    return CudaUploader(wanted) if wanted.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class _Slice:
    """num_bytes of `tensor`, from its byte `at` on, that lie at `offset` in the buffer."""

    tensor: StoredTensor
    at: int
    offset: int
    num_bytes: int

    @property
    def file_start(self) -> int:
        return self.tensor.start + self.at


@dataclass(slots=True)
class _Piece:
    """What one buffer takes of one file."""

    path: Path
    slices: list[_Slice] = field(default_factory=list)
    num_bytes: int = 0

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(offset in the buffer, offset in the file, bytes) of what lies together in both."""
        for shift, run in groupby(self.slices, lambda part: part.file_start - part.offset):
            parts = list(run)
            end = parts[-1].offset + parts[-1].num_bytes
            yield parts[0].offset, parts[0].offset + shift, end - parts[0].offset


def staged(
    tensors: Sequence[StoredTensor],
    uploader: Uploader,
    *,
    buffer_bytes: int = BUFFER_BYTES,
    threads: int | None = None,
) -> Generator[tuple[str, Tensor], None, None]:
    """Yields (name, tensor on the device in its stored dtype), in the order given. A tensor is its taker's to keep.

    Raises ModelLoadError naming file and tensor. Leaving early ends the threads.
    """
    import torch

    for tensor in tensors:
        _check(tensor)
    threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
    buffer_bytes = max(1, min(buffer_bytes, sum(tensor.num_bytes for tensor in tensors)))
    ring = _Ring(uploader, threads + 1, buffer_bytes)
    target: Tensor | None = None
    pieces = ahead(enumerate(_pieces(tensors, buffer_bytes)), ring.read, threads=threads)
    try:
        with closing(pieces):
            for (index, piece), buffer in pieces:
                whole: list[tuple[str, Tensor]] = []
                for part in piece.slices:
                    tensor = part.tensor
                    if target is None:
                        target = uploader.empty(tensor.shape, getattr(torch, tensor.dtype))
                    if part.num_bytes:
                        flat = target.reshape(-1).view(torch.uint8)
                        source = buffer[part.offset : part.offset + part.num_bytes]
                        uploader.upload(flat[part.at : part.at + part.num_bytes], source)
                    if part.at + part.num_bytes == tensor.num_bytes:
                        whole.append((tensor.name, target))
                        target = None
                ring.uploaded(index)
                while whole:
                    yield whole.pop(0)
    finally:
        ring.drain()


class _Ring:
    """Piece i is read into buffer i modulo `count`, once the piece before it in that buffer has been uploaded.

    With `threads` readers and one buffer more, `ahead` begins piece i only when the consumer is past piece i - count, so
    its fence is there, and a reader waits for the device alone.
    """

    def __init__(self, uploader: Uploader, count: int, num_bytes: int) -> None:
        self._uploader = uploader
        self._num_bytes = num_bytes
        self._buffers: list[Tensor | None] = [None] * count
        self._fences: list[Fence | None] = [None] * count

    def read(self, item: tuple[int, _Piece]) -> Tensor:
        """In a thread of the pool. The buffer with the piece in it."""
        index, piece = item
        slot = index % len(self._buffers)
        fence = self._fences[slot]
        if fence is not None:
            fence.synchronize()
        buffer = self._buffers[slot]
        if buffer is None:  # made here, so that the threads share the cost of pinning
            buffer = self._buffers[slot] = self._uploader.buffer(self._num_bytes)
        view = buffer.numpy().data
        try:
            with piece.path.open("rb", buffering=0) as file:
                for offset, start, num_bytes in piece.runs():
                    _read_into(file, view[offset : offset + num_bytes], start, piece.path)
        except OSError as error:
            raise ModelLoadError(f"{piece.path}: cannot be read: {error.strerror}") from error
        return buffer

    def uploaded(self, index: int) -> None:
        """Piece `index` is queued for the device."""
        self._fences[index % len(self._fences)] = self._uploader.fence()

    def drain(self) -> None:
        """Waits for the device to be done with every buffer."""
        for fence in self._fences:
            if fence is not None:
                fence.synchronize()


def _read_into(file: FileIO, view: memoryview, start: int, path: Path) -> None:
    """Fills `view` from byte `start` of a file that no other thread reads through."""
    file.seek(start)
    while view:
        count = file.readinto(view)
        if not count:
            raise ModelLoadError(f"{path}: truncated: {len(view)} bytes are missing at byte {start}")
        view = view[count:]
        start += count


def _pieces(tensors: Iterable[StoredTensor], buffer_bytes: int) -> Iterator[_Piece]:
    """Cuts the tensors into full buffers. A piece ends with its file, and in the middle of a tensor where it is full."""
    piece: _Piece | None = None
    for tensor in tensors:
        at = 0
        while True:
            if piece is None or piece.path != tensor.path or piece.num_bytes == buffer_bytes:
                if piece is not None:
                    yield piece
                piece = _Piece(tensor.path)
            num_bytes = min(tensor.num_bytes - at, buffer_bytes - piece.num_bytes)
            piece.slices.append(_Slice(tensor, at, piece.num_bytes, num_bytes))
            piece.num_bytes += num_bytes
            at += num_bytes
            if at == tensor.num_bytes:
                break
    if piece is not None:
        yield piece


def _check(tensor: StoredTensor) -> None:
    """Raises ModelLoadError unless the bytes are those of the shape in the dtype."""
    import torch

    dtype = getattr(torch, tensor.dtype, None) if tensor.dtype else None
    if dtype is None:
        raise ModelLoadError(
            f"{tensor.path}: the tensor {tensor.name!r} is stored as {tensor.stored_type}, which cannot be loaded onto a GPU"
        )
    if prod(tensor.shape) * dtype.itemsize != tensor.num_bytes:
        raise ModelLoadError(
            f"{tensor.path}: damaged: the tensor {tensor.name!r} of shape {list(tensor.shape)} in {tensor.stored_type} "
            f"has {tensor.num_bytes} bytes"
        )
