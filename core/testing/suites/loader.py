"""What every loader must hold: each tensor once and whole, and a damaged file is a ModelLoadError that names it.

from hotswap.core.testing.suites import LoaderSuite

class TestMyLoader(LoaderSuite):
    plugin = "hotswap_my_loader"

    def make_checkpoint(self, folder):    # for formats other than safetensors
        ...
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ...contracts.loader import Checkpoint, Loader, ModelLoadError
from .base import ConformanceSuite

_TRICKY = (0, 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)


class LoaderSuite(ConformanceSuite):
    """fuzz_cases: damaged copies that are tried. exact: whether `make_checkpoint` says the stored values; a format that
    rounds them sets the relative `tolerance`."""

    kind: ClassVar[str] = "loader"
    fuzz_cases: ClassVar[int] = 200
    tolerance: ClassVar[float] = 0.0

    # For authors.

    def make_checkpoint(self, folder: Path) -> tuple[Path, Mapping[str, Tensor] | None]:
        """Writes a checkpoint of a few small tensors into the empty `folder`. Returns what to open, and every tensor as the
        loader should give it with dtype None (the dtypes are compared, too); None when it makes its weights up.
        """
        from safetensors.torch import save_file

        tensors = sample_tensors()
        save_file(tensors, folder / "model.safetensors")
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "vocab_size": 40}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder, tensors

    # Building.

    @pytest.fixture
    def stored(self, tmp_path: Path) -> tuple[Path, Mapping[str, Tensor] | None]:
        """What `make_checkpoint` wrote: the path to open, and its tensors. Skips the test while that is not written for the
        loader's format.
        """
        (tmp_path / "checkpoint").mkdir()
        path, tensors = self.make_checkpoint(tmp_path / "checkpoint")
        if type(self).make_checkpoint is LoaderSuite.make_checkpoint and not self.build().accepts(path):
            pytest.skip(
                "cannot be checked without a checkpoint of its format: subclass LoaderSuite, write make_checkpoint"
            )
        return path, tensors

    def opened(self, path: Path) -> Checkpoint:
        loader: Loader = self.build()
        if not loader.accepts(path):
            pytest.fail(
                f"{loader.name} does not accept what make_checkpoint wrote: write make_checkpoint for its format",
                pytrace=False,
            )
        return loader.open(path)

    # The tests.

    def test_accepts_its_own_and_nothing_else(self, stored: Any, tmp_path: Path) -> None:
        """`accepts` is True for its format, and False, without an error, for what is not a checkpoint at all."""
        loader: Loader = self.build()
        assert self.opened(stored[0]) is not None
        empty = tmp_path / "empty"
        empty.mkdir()
        text = tmp_path / "notes.txt"
        text.write_text("no model")
        for path in (empty, text, tmp_path / "absent"):
            assert not loader.accepts(path), f"it accepts {path.name}"

    def test_accepts_reads_no_weights(self, stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`accepts` looks at names and first bytes only: it answers the same when the rest of every file is noise."""
        path, _ = stored
        copy = _copied(path, tmp_path / "copy")
        for file in _files(copy):
            with file.open("r+b") as open_file:
                size = file.stat().st_size
                open_file.seek(min(16, size))
                open_file.write(random.Random(0).randbytes(max(0, size - 16)))
        monkeypatch.setattr(socket, "socket", _no_network)
        assert self.build().accepts(copy), "it looks at more than names and first bytes"

    def test_opening_gives_plain_metadata(self, stored: Any) -> None:
        """An open checkpoint has every attribute of the contract, in its type."""
        path, _ = stored
        with self.opened(path) as checkpoint:
            assert isinstance(checkpoint.path, Path)
            assert isinstance(checkpoint.config, dict) and isinstance(checkpoint.generation_config, dict)
            assert checkpoint.chat_template is None or isinstance(checkpoint.chat_template, str)
            eos = checkpoint.eos_token_ids
            assert isinstance(eos, tuple) and all(type(token) is int for token in eos) and list(eos) == sorted(set(eos))
            assert isinstance(checkpoint.needs_remote_code, bool)
            assert type(checkpoint.total_bytes) is int and checkpoint.total_bytes >= 0
            spec = checkpoint.tokenizer_spec()
            assert spec is None or isinstance(spec.tokenizer_json, bytes)

    def test_metadata_alone_can_be_opened(self, stored: Any) -> None:
        """`open_metadata` gives the same config as `open`."""
        path, _ = stored
        with self.opened(path) as checkpoint, self.build().open_metadata(path) as metadata:
            assert metadata.config == checkpoint.config

    def test_every_tensor_comes_once_and_whole(self, stored: Any) -> None:
        """`weights` yields each tensor once, in the order of `weight_names`, with the stored shape, dtype and values."""
        path, tensors = self._with_tensors(stored)
        with self.opened(path) as checkpoint:
            names = checkpoint.weight_names()
            found = list(checkpoint.weights(None))
            assert [name for name, _ in found] == names, "not in the order of weight_names, or not each once"
            assert sorted(names) == sorted(tensors)
            for name, tensor in found:
                wanted = tensors[name]
                assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype), f"{name}: {tensor.dtype}"
                self._same(name, tensor, wanted)

    def test_weights_can_be_read_again(self, stored: Any) -> None:
        """A second reading gives the same, also after one that was broken off."""
        path, tensors = self._with_tensors(stored)
        with self.opened(path) as checkpoint:
            next(iter(checkpoint.weights(None)))
            for _ in range(2):
                assert {name for name, _ in checkpoint.weights(None)} == set(tensors)

    def test_names_limit_what_is_read(self, stored: Any) -> None:
        """`names` picks tensors, in the checkpoint's order; an unknown name picks nothing."""
        path, _ = self._with_tensors(stored)
        with self.opened(path) as checkpoint:
            names = checkpoint.weight_names()
            wanted = [names[-1], names[0], "no.such.tensor"]
            assert [name for name, _ in checkpoint.weights(None, wanted)] == sorted(
                {names[0], names[-1]}, key=names.index
            )
            assert list(checkpoint.weights(None, [])) == []

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_floats_are_converted_and_nothing_else(self, stored: Any, dtype: torch.dtype) -> None:
        """With a dtype, floating-point tensors of two or more bytes come in it; integers and 8-bit floats as stored."""
        path, tensors = self._with_tensors(stored)
        with self.opened(path) as checkpoint:
            for name, tensor in checkpoint.weights(dtype):
                wanted = tensors[name]
                converted = wanted.is_floating_point() and wanted.element_size() > 1
                assert tensor.dtype == (dtype if converted else wanted.dtype), f"{name}: {tensor.dtype}"
                assert tensor.device.type == "cpu"
                self._same(name, tensor, wanted.to(tensor.dtype), tensor.dtype)

    def test_tensors_outlive_the_checkpoint(self, stored: Any) -> None:
        """Tensors that were handed out stay valid after `close`; closing twice is fine."""
        path, tensors = self._with_tensors(stored)
        checkpoint = self.opened(path)
        found = dict(checkpoint.weights(None))
        checkpoint.close()
        checkpoint.close()
        for name, tensor in found.items():
            self._same(name, tensor, tensors[name])

    def test_closing_twice_is_fine(self, stored: Any) -> None:
        """`close` may be called more than once, and before anything was read."""
        checkpoint = self.opened(stored[0])
        checkpoint.close()
        checkpoint.close()

    def test_truncated_files_are_named(self, stored: Any, tmp_path: Path) -> None:
        """A file that holds weights, cut short anywhere, is a ModelLoadError that names it, never fewer tensors."""
        path, _ = self._with_tensors(stored)
        copy = _copied(path, tmp_path / "copy")
        file = max(_files(copy), key=lambda file: file.stat().st_size)  # the weights
        content = file.read_bytes()
        sizes = {0, 1, 4, 9, len(content) - 1, *(len(content) * part // 16 for part in range(1, 16))}
        for size in sorted(sizes):
            file.write_bytes(content[:size])
            error = self._error(copy)
            assert error is not None, f"the first {size} of {len(content)} bytes were read as a whole checkpoint"
            assert _names(error, file, copy), f"the message does not name {file.name}: {error}"

    def test_garbage_is_named(self, stored: Any, tmp_path: Path) -> None:
        """Noise, an empty file and text where a file of the checkpoint should be are ModelLoadErrors that name it."""
        path, _ = stored
        for index, original in enumerate(_files(path)):
            for number, content in enumerate(
                (b"", b"not a model\n" * 40, random.Random(1).randbytes(3000), b"[" * 200_000)
            ):
                copy = _copied(path, tmp_path / f"{index}-{number}")
                file = copy if copy.is_file() else copy / original.relative_to(path)
                file.write_bytes(content)
                if not self.build().accepts(copy):
                    continue
                error = self._error(copy)
                if error is not None:
                    assert _names(error, file, copy), f"the message does not name {file.name}: {error}"

    def test_missing_is_said(self, tmp_path: Path) -> None:
        """Opening what is not there, or an empty folder, is a ModelLoadError that names the path."""
        loader: Loader = self.build()
        (tmp_path / "empty").mkdir()
        for path in (tmp_path / "absent", tmp_path / "empty"):
            with pytest.raises(ModelLoadError) as caught:
                loader.open(path)
            assert path.name in str(caught.value), f"the message does not name {path.name}: {caught.value}"

    def test_damaged_files_raise_load_errors_only(self, stored: Any, tmp_path: Path) -> None:
        """Random damage is a ModelLoadError or goes unnoticed, and never any other error: no crash, no huge allocation."""
        path, _ = stored
        copy = _copied(path, tmp_path / "copy")
        originals = {file: file.read_bytes() for file in _files(copy)}
        rng = random.Random(self.seed or 0)
        for case in range(self.fuzz_cases):
            file = rng.choice(list(originals))
            damaged = mutate(originals[file], rng)
            file.write_bytes(damaged)
            try:
                self._error(copy)
            except Exception as error:  # noqa: BLE001  # what the test is about: any error but a ModelLoadError
                pytest.fail(f"case {case}, {file.name}: {type(error).__name__}: {error}")
            file.write_bytes(originals[file])
        assert self._error(copy) is None, "the undamaged copy cannot be read any more"

    def _with_tensors(self, stored: tuple[Path, Mapping[str, Tensor] | None]) -> tuple[Path, Mapping[str, Tensor]]:
        path, tensors = stored
        if tensors is None or self._makes_weights_up(path):
            pytest.skip("it makes its weights up")
        return path, tensors

    def _makes_weights_up(self, path: Path) -> bool:
        with self.opened(path) as checkpoint:
            return type(checkpoint).weights_for is not Checkpoint.weights_for and not checkpoint.weight_names()

    def _same(self, name: str, found: Tensor, wanted: Tensor, dtype: torch.dtype | None = None) -> None:
        if self.tolerance and wanted.is_floating_point():
            rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}.get(dtype or torch.float32, 0.0)
            limit = (self.tolerance + rounding) * wanted.double().abs().max()
            assert (found.double() - wanted.double()).abs().max() <= limit, f"{name}: other values"
        else:
            assert torch.equal(_bytes(found), _bytes(wanted)), f"{name}: other values"

    def _error(self, path: Path) -> ModelLoadError | None:
        """What opening and reading everything raises; None when all is well."""
        try:
            with self.build().open(path) as checkpoint:
                checkpoint.tokenizer_spec()
                if checkpoint.weight_names():
                    for _ in checkpoint.weights(torch.bfloat16):
                        pass
        except ModelLoadError as error:
            return error
        return None


def sample_tensors() -> dict[str, Tensor]:
    """A handful of every sort: matrices, a vector, a scalar, integers, 8-bit floats, half precision."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(40, 16, generator=generator),
        "model.layers.0.mlp.down_proj.weight": torch.randn(16, 33, generator=generator).to(torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": torch.randn(33, 16, generator=generator).to(torch.float16),
        "model.layers.0.mlp.up_proj.qweight": torch.arange(24, dtype=torch.int32).reshape(4, 6),
        "model.layers.0.mlp.up_proj.scales": torch.randn(8, generator=generator).to(torch.float8_e4m3fn),
        "model.layers.0.scale": torch.tensor(3.5),
        "model.norm.weight": torch.randn(16, generator=generator),
    }


def mutate(content: bytes, rng: random.Random) -> bytes:
    """A few bits, bytes or numbers changed, or a piece cut out: mostly near the start, where headers are."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if len(data) < 16:
            break
        at = rng.randrange(min(len(data) - 8, rng.choice((64, 1024, len(data)))))
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice((0, 1, 34, 44, 58, 91, 123, 125, 127, 128, 255))
            case 2:
                struct.pack_into("<Q", data, at, rng.choice(_TRICKY))
            case 3:
                struct.pack_into("<I", data, at, rng.choice(_TRICKY) & 0xFFFFFFFF)
            case 4:
                del data[at : at + rng.randrange(1, 40)]
            case 5:
                del data[rng.randrange(len(data)) :]
    return bytes(data)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _copied(path: Path, target: Path) -> Path:
    """A copy beside the original, under its own name."""
    target.mkdir()
    if path.is_file():
        return Path(shutil.copy(path, target / path.name))
    return Path(shutil.copytree(path, target / path.name))


def _names(error: ModelLoadError, file: Path, opened: Path) -> bool:
    """Whether the message names the file; for a folder that holds nothing else, its own name will do."""
    return file.name in str(error) or (opened.is_dir() and len(_files(opened)) == 1 and opened.name in str(error))


def _no_network(*_: Any, **__: Any) -> Any:
    raise AssertionError("it opened a socket")
