"""Tensors through a ring of host buffers: order, pieces, reuse of buffers, damage. The device is this process's memory."""

from __future__ import annotations

import json
import os
import random
import struct
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hotswap.core.contracts.loader import ModelLoadError
from hotswap.plugins.loaders import safetensors as safetensors_loader
from hotswap.plugins.loaders.safetensors import SafetensorsCheckpoint, SafetensorsLoader
from hotswap.plugins.loaders.staging import CudaUploader, StoredTensor, staged, uploader_for

BUFFER = 64  # bytes: most tensors below take several


class LateDevice:
    """A device that has copied nothing before somebody waits for it, so that a buffer that is filled again too early gives
    wrong values; and whose memory is noise before."""

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.lock = threading.Lock()
        self.buffers: list[Tensor] = []
        self.num_waits = 0
        self.num_done = 0

    def buffer(self, num_bytes: int) -> Tensor:
        made = torch.full((num_bytes,), 0xAA, dtype=torch.uint8)
        with self.lock:
            self.buffers.append(made)
        return made

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype)
        made.reshape(-1).view(torch.uint8).fill_(0x55)
        return made

    def upload(self, target: Tensor, source: Tensor) -> None:
        assert target.numel() == source.numel() and target.dtype == source.dtype == torch.uint8
        with self.lock:
            self.pending.append((target, source))

    def fence(self) -> LateFence:
        with self.lock:
            return LateFence(self, len(self.pending))

    def settle(self, count: int) -> None:
        with self.lock:
            self.num_waits += 1
            while self.num_done < count:
                target, source = self.pending[self.num_done]
                target.copy_(source)
                self.num_done += 1


class LateFence:
    def __init__(self, device: LateDevice, count: int) -> None:
        self._device, self._count = device, count

    def synchronize(self) -> None:
        self._device.settle(self._count)


def values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a.big": torch.randn(37, 11),
        "b.half": torch.randn(5, 7).to(torch.bfloat16),
        "c.byte": torch.randint(0, 255, (3,), dtype=torch.uint8),
        "d.f8": torch.randn(130).to(torch.float8_e4m3fn),
        "e.scalar": torch.tensor(7, dtype=torch.int64),
        "f.none": torch.empty(0, 4),
        "g.flags": torch.tensor([True, False, True]),
        "h.half": torch.randn(64).to(torch.float16),
        "i.wide": torch.randn(9, dtype=torch.float64),
    }


def folder_of(path: Path, *shards: dict[str, Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for n, shard in enumerate(shards, 1):
        save_file(shard, path / f"model-{n:05}-of-{len(shards):05}.safetensors")
    return path


def opened(folder: Path) -> SafetensorsCheckpoint:
    return SafetensorsLoader().open(folder)


def taken(
    tensors: list[StoredTensor], device: LateDevice, threads: int, buffer: int = BUFFER
) -> list[tuple[str, Tensor]]:
    return list(staged(tensors, device, buffer_bytes=buffer, threads=threads))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("buffer", [7, 61, 64, 1 << 20])
def test_every_tensor_in_order_and_whole(tmp_path: Path, threads: int, buffer: int) -> None:
    first, second = values(), {f"z.{name}": tensor for name, tensor in values().items()}
    with opened(folder_of(tmp_path, first, second)) as checkpoint:
        names = checkpoint.weight_names()
        device = LateDevice()
        found = taken(checkpoint.stored_tensors(), device, threads, buffer)
    assert [name for name, _ in found] == names
    for name, tensor in found:
        wanted = {**first, **second}[name]
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), name
    assert len(device.buffers) <= threads + 1
    assert sum(buffer.numel() for buffer in device.buffers) <= (threads + 1) * buffer


def test_buffers_are_used_again_and_waited_for(tmp_path: Path) -> None:
    with opened(folder_of(tmp_path, {"w": torch.arange(4096, dtype=torch.int32)})) as checkpoint:
        device = LateDevice()
        ((_, tensor),) = taken(checkpoint.stored_tensors(), device, threads=3)
    assert torch.equal(tensor, torch.arange(4096, dtype=torch.int32))
    assert len(device.buffers) == 4 and device.num_waits >= 4096 * 4 // BUFFER - 4


def test_no_buffer_is_larger_than_the_checkpoint(tmp_path: Path) -> None:
    with opened(folder_of(tmp_path, {"w": torch.ones(10)})) as checkpoint:
        device = LateDevice()
        taken(checkpoint.stored_tensors(), device, threads=2, buffer=1 << 30)
    assert [buffer.numel() for buffer in device.buffers] == [40]


class HastyDevice(LateDevice):
    """Copies at once: what is done with a tensor as soon as it comes must see its values."""

    def upload(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


def test_floats_are_converted_on_the_device_and_others_come_as_stored(tmp_path: Path) -> None:
    stored = values()
    with opened(folder_of(tmp_path, stored)) as checkpoint:
        found = dict(checkpoint.uploaded(HastyDevice(), torch.float16))
        plain = dict(checkpoint.weights(torch.float16))
    assert found.keys() == plain.keys()
    for name, tensor in found.items():
        assert tensor.dtype == plain[name].dtype, name
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), plain[name].reshape(-1).view(torch.uint8)), name


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """Tensors between which others lie, and in another order than the file's."""
    with opened(folder_of(tmp_path, values())) as checkpoint:
        wanted = [tensor for tensor in checkpoint.stored_tensors() if tensor.name in ("a.big", "h.half", "i.wide")]
        wanted.reverse()
        found = taken(wanted, LateDevice(), threads=2)
    assert [name for name, _ in found] == [tensor.name for tensor in wanted]
    assert all(torch.equal(tensor, values()[name]) for name, tensor in found)


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_leaving_early_ends_the_threads_and_settles_the_device(tmp_path: Path) -> None:
    with opened(folder_of(tmp_path, {f"t{n}": torch.ones(64) for n in range(50)})) as checkpoint:
        device = LateDevice()
        reading = staged(checkpoint.stored_tensors(), device, buffer_bytes=BUFFER, threads=3)
        next(reading)
        assert loader_threads()
        reading.close()
    assert not loader_threads()
    assert device.pending and device.num_done == len(device.pending), "the device still reads buffers that are gone"


def test_an_error_in_the_taker_ends_the_threads(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {f"t{n}": torch.ones(64) for n in range(50)})
    with pytest.raises(ZeroDivisionError), opened(folder) as checkpoint:
        for _ in staged(checkpoint.stored_tensors(), LateDevice(), buffer_bytes=BUFFER, threads=3):
            raise ZeroDivisionError
    assert not loader_threads()


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_file_that_shrinks_after_opening_is_named(tmp_path: Path, keep: int) -> None:
    with opened(folder_of(tmp_path, {"a": torch.ones(500)}, {"b": torch.ones(500)})) as checkpoint:
        victim = tmp_path / "model-00002-of-00002.safetensors"
        os.truncate(victim, victim.stat().st_size + keep if keep < 0 else keep)
        reading = staged(checkpoint.stored_tensors(), LateDevice(), buffer_bytes=BUFFER, threads=2)
        assert next(reading)[0] == "a"
        with pytest.raises(ModelLoadError, match=f"{victim.name}: truncated: .* missing at byte"):
            next(reading)
    assert not loader_threads()


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with opened(folder_of(tmp_path, {"a": torch.ones(5)})) as checkpoint:
        (tmp_path / "model-00001-of-00001.safetensors").unlink()
        with pytest.raises(ModelLoadError, match=r"model-00001-of-00001\.safetensors: cannot be read: No such file"):
            taken(checkpoint.stored_tensors(), LateDevice(), threads=2)


def written(folder: Path, header: dict[str, object], num_bytes: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    return folder


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
            r"damaged: the tensor 'w' of shape \[3\] in F32 has 8",
        ),
        ({"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}, "stored as F4, which cannot be loaded onto a GPU"),
        ({"dtype": "__loader__", "shape": [8], "data_offsets": [0, 8]}, "stored as __loader__"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(
    tmp_path: Path, entry: dict[str, object], message: str
) -> None:
    with opened(written(tmp_path, {"w": entry}, 8)) as checkpoint, pytest.raises(ModelLoadError, match=message):
        taken(checkpoint.stored_tensors(), LateDevice(), threads=1)


@pytest.mark.parametrize("offsets", [([0, 8], [4, 12]), ([0, 4], [8, 12]), ([4, 8], [8, 12])])
def test_tensors_that_overlap_or_leave_a_hole_are_refused_at_opening(
    tmp_path: Path, offsets: tuple[list[int], list[int]]
) -> None:
    header: dict[str, object] = {
        name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for name, (start, end) in zip("ab", offsets, strict=True)
    }
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: damaged: the tensor"):
        opened(written(tmp_path, header, 12))


def test_a_damaged_file_is_a_load_error_whatever_the_damage(tmp_path: Path) -> None:
    """Through the ring as through the map: a ModelLoadError, or values; never another exception."""
    folder = folder_of(tmp_path, values())
    file = folder / "model-00001-of-00001.safetensors"
    content = file.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    random.seed(1)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(random.randint(1, 3)):
            damaged[random.randrange(header)] = random.choice(b'0123456789[]{}",:FUB\x00\xff')
        file.write_bytes(damaged)
        try:
            with opened(folder) as checkpoint:
                taken(checkpoint.stored_tensors(), LateDevice(), threads=1)
        except ModelLoadError as error:
            refused += 1
            assert str(folder) in str(error)
    assert refused > 100


def test_which_devices_are_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU takes the mapped file as before; "cuda" devices the ring."""
    assert uploader_for("cpu") is None
    assert isinstance(uploader_for("cuda:1"), CudaUploader)
    with opened(folder_of(tmp_path, values())) as checkpoint:
        monkeypatch.setattr(safetensors_loader, "staged", None)
        found = dict(checkpoint.weights_for([], torch.float32, 0, "cpu"))
        assert found.keys() == values().keys()
        device = HastyDevice()
        monkeypatch.undo()
        monkeypatch.setattr(safetensors_loader, "uploader_for", lambda name: device if name == "cuda:0" else None)
        uploaded = dict(checkpoint.weights_for([], torch.float32, 0, "cuda:0"))
    assert device.buffers and uploaded.keys() == found.keys()
    assert torch.equal(uploaded["b.half"], found["b.half"])
