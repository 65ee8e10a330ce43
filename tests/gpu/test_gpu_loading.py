"""Loading onto a card: the same bits as from the mapped file, at the speed of the machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hotswap.core.contracts.loader import WeightSpec
from hotswap.core.layers.rotary import cos_sin_table, rope_config
from hotswap.plugins.loaders.dummy import AMPLITUDE, DummyLoader
from hotswap.plugins.loaders.safetensors import SafetensorsCheckpoint, SafetensorsLoader
from hotswap.plugins.loaders.staging import CudaUploader, staged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = "cuda:0"


def folder_of(folder: Path, *shards: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for n, shard in enumerate(shards, 1):
        save_file(shard, folder / f"model-{n:05}-of-{len(shards):05}.safetensors")
    return folder


def opened(folder: Path) -> SafetensorsCheckpoint:
    return SafetensorsLoader().open(folder)


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().reshape(-1).view(torch.uint8)


def sample() -> dict[str, Tensor]:
    """Sizes around those of the buffers below, and all kinds of dtypes."""
    torch.manual_seed(3)
    return {
        "matrix": torch.randn(1111, 777),
        "half": torch.randn(513, 300).to(torch.bfloat16),
        "float8": torch.randn(4097).to(torch.float8_e4m3fn),
        "packed": torch.randint(-(2**31), 2**31 - 1, (999,), dtype=torch.int32),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 8),
        "long": torch.randn(3_000_000),
    }


@pytest.mark.parametrize(("threads", "buffer"), [(1, 4096), (8, 65_537), (8, 32 << 20)])
def test_the_same_bits_as_from_the_mapped_file(tmp_path: Path, threads: int, buffer: int) -> None:
    with opened(folder_of(tmp_path, sample(), {f"z.{k}": v for k, v in sample().items()})) as checkpoint:
        uploader = CudaUploader(torch.device(DEVICE))
        found = list(staged(checkpoint.stored_tensors(), uploader, buffer_bytes=buffer, threads=threads))
        stored = dict(checkpoint.weights(None))
    assert [name for name, _ in found] == list(stored)
    for name, tensor in found:
        assert (str(tensor.device), tensor.dtype, tensor.shape) == (DEVICE, stored[name].dtype, stored[name].shape)
        assert torch.equal(bits(tensor), bits(stored[name])), name


def test_values_are_there_when_a_tensor_is_taken(tmp_path: Path) -> None:
    """Whoever takes a tensor works in the current stream, at once, and drops it; its memory is used for the next."""
    torch.manual_seed(4)
    stored = {f"t{n:03}": torch.randn(100_000 + n) for n in range(64)}
    with opened(folder_of(tmp_path, stored)) as checkpoint:
        kept = {name: tensor.clone().mul_(2) for name, tensor in checkpoint.weights_for([], torch.bfloat16, 0, DEVICE)}
    for name, tensor in kept.items():
        assert torch.equal(tensor.cpu(), stored[name].to(torch.bfloat16) * 2), name


def test_leaving_early_and_loading_again(tmp_path: Path) -> None:
    with opened(folder_of(tmp_path, sample())) as checkpoint:
        uploader = CudaUploader(torch.device(DEVICE))
        reading = staged(checkpoint.stored_tensors(), uploader, buffer_bytes=4096)
        next(reading)
        reading.close()
        again = dict(checkpoint.weights_for([], torch.float32, 0, DEVICE))
    assert torch.equal(bits(again["long"]), bits(sample()["long"]))


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where the machine has such a place: the disk is not what is measured."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    folder = shm / f"hotswap-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_more_than_four_gigabytes_a_second_from_a_warm_page_cache(memory_folder: Path) -> None:
    """benchmarks/gpu/load.py measures the whole 16 GB; this is a guard."""
    block = torch.randint(0, 255, (256 << 20,), dtype=torch.uint8)
    shards = [{f"w{n}.{k}": block.clone() for k in range(4)} for n in range(4)]
    with opened(folder_of(memory_folder, *shards)) as checkpoint:
        rates = []
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _, tensor in checkpoint.weights_for([], torch.bfloat16, 0, DEVICE):
                last = tensor
            torch.cuda.synchronize()
            rates.append(checkpoint.total_bytes / (time.perf_counter() - began) / 1e9)
    assert torch.equal(last.cpu(), block)
    assert max(rates) > 4.0, f"GB/s: {rates}"


def test_dummy_weights_of_eight_billion_parameters_take_half_a_second(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    shapes = [(4096, 4096)] * 64 + [(1024, 4096)] * 64 + [(14336, 4096)] * 96 + [(128256, 4096)] * 2 + [(4096,)] * 65
    specs = [WeightSpec(f"t{n}.weight", shape) for n, shape in enumerate(shapes)]
    with DummyLoader().open(tmp_path) as checkpoint:
        first = dict(checkpoint.weights_for(specs[:3], torch.bfloat16, 0, DEVICE))
        torch.cuda.synchronize()
        began = time.perf_counter()
        for name, tensor in checkpoint.weights_for(specs, torch.bfloat16, 0, DEVICE):
            if name in first:
                assert torch.equal(tensor, first[name]), "a name and a seed give the same values"
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    values = first["t0.weight"].float()
    assert values.abs().max() <= AMPLITUDE * 1.004  # ends are rounded to bfloat16
    assert abs(values.mean().item()) < AMPLITUDE * 2**-7  # torch draws in bfloat16 itself: a step of its 8 bits off
    assert values.std().item() == pytest.approx(AMPLITUDE / 3**0.5, rel=1e-2)
    assert seconds < 0.5


def test_rotation_tables_are_the_cpus(tmp_path: Path) -> None:
    config = rope_config({"rope_theta": 500000.0, "max_position_embeddings": 131072}, 128)
    table = cos_sin_table(config, 131072, DEVICE)
    assert str(table.device) == DEVICE
    torch.testing.assert_close(table.cpu(), cos_sin_table(config, 131072), rtol=0, atol=1e-6)
