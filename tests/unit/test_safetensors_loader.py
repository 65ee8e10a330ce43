"""Folders of safetensors: shards, indexes, damage; the metadata beside them; dummy weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hotswap.core.contracts.loader import ModelLoadError, WeightSpec
from hotswap.core.testing.tiny_models import save_byte_tokenizer
from hotswap.core.text import Tokenizer
from hotswap.plugins.loaders.dummy import DummyLoader
from hotswap.plugins.loaders.gguf import GGUFLoader
from hotswap.plugins.loaders.safetensors import INDEX, SafetensorsCheckpoint, SafetensorsLoader


def dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def folder_with(tmp_path: Path, **config: Any) -> Path:
    dump(tmp_path / "config.json", {"model_type": "llama", **config})
    return tmp_path


def shards(folder: Path, **changes: dict[str, torch.Tensor]) -> list[Path]:
    """Three shards, one tensor each, named 1, 10 and 2 of 10; `changes` replaces a shard's content."""
    paths = []
    weight_map = {}
    for n in (1, 10, 2):
        path = folder / f"model-{n:05}-of-00010.safetensors"
        tensors = changes.get(f"s{n}", {f"t{n}": torch.full((2, 3), float(n))})
        save_file(tensors, path)
        weight_map.update(dict.fromkeys(tensors, path.name))
        paths.append(path)
    dump(folder / INDEX, {"metadata": {}, "weight_map": weight_map})
    return paths


def opened(folder: Path) -> SafetensorsCheckpoint:
    assert SafetensorsLoader().accepts(folder)
    return SafetensorsLoader().open(folder)


def test_one_file(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    stored = {
        "w": torch.randn(4, 5),
        "ids": torch.arange(3, dtype=torch.int32),
        "f8": torch.randn(4).to(torch.float8_e4m3fn),
    }
    save_file(stored, folder / "model.safetensors")
    with opened(folder) as checkpoint:
        assert sorted(checkpoint.weight_names()) == ["f8", "ids", "w"] and checkpoint.total_bytes == 80 + 12 + 4
        loaded = dict(checkpoint.weights(torch.bfloat16))
        as_stored = dict(checkpoint.weights(None))
        assert [name for name, _ in checkpoint.weights(None, names=["w"])] == ["w"]
    assert torch.equal(loaded["w"], stored["w"].to(torch.bfloat16))
    assert loaded["ids"].dtype == torch.int32 and loaded["f8"].dtype == torch.float8_e4m3fn
    assert torch.equal(as_stored["w"], stored["w"])


def test_sharded_in_name_order(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    shards(folder)
    with opened(folder) as checkpoint:
        assert [(name, tensor[0, 0].item()) for name, tensor in checkpoint.weights(torch.float32)] == [
            ("t1", 1.0),
            ("t2", 2.0),
            ("t10", 10.0),
        ]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    paths = shards(folder)
    paths[1].unlink()
    with pytest.raises(ModelLoadError, match=paths[1].name):
        opened(folder)


@pytest.mark.parametrize("size", [0, 5, 40, -1])
def test_a_truncated_shard_is_named(tmp_path: Path, size: int) -> None:
    folder = folder_with(tmp_path)
    paths = shards(folder)
    content = paths[2].read_bytes()
    paths[2].write_bytes(content[:size])
    with pytest.raises(ModelLoadError, match=f"{paths[2].name}: (truncated|damaged)"):
        opened(folder)


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    paths = shards(folder)
    content = bytearray(paths[0].read_bytes())
    content[8] = ord("[")
    paths[0].write_bytes(content)
    with pytest.raises(ModelLoadError, match=f"{paths[0].name}: damaged"):
        opened(folder)


def test_a_promised_tensor_must_be_there(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    paths = shards(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost"] = paths[0].name
    dump(folder / INDEX, index)
    with pytest.raises(ModelLoadError, match="'ghost'"):
        opened(folder)


def test_the_same_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    both = {"twice": torch.zeros(1)}
    shards(folder, s1={"t1": torch.zeros(1), **both}, s10={"t10": torch.zeros(1), **both})
    with pytest.raises(ModelLoadError, match="'twice' is also in"):
        opened(folder)


def test_an_extra_tensor_in_a_shard_is_handed_on(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    paths = shards(folder)
    save_file({"t1": torch.zeros(1), "extra": torch.zeros(1)}, paths[0])
    with opened(folder) as checkpoint:
        assert "extra" in checkpoint.weight_names()  # the model reports what it does not use


@pytest.mark.parametrize("name", ["../x.safetensors", "a/b.safetensors", "x.bin", "/etc/passwd"])
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, name: str) -> None:
    folder = folder_with(tmp_path)
    dump(folder / INDEX, {"weight_map": {"t": name}})
    with pytest.raises(ModelLoadError, match="is not the name of a safetensors file"):
        opened(folder)


def test_the_index_decides_and_consolidated_files_are_ignored(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    shards(folder)
    poison = {"t1": torch.full((2, 3), float("nan"))}
    save_file(poison, folder / "consolidated.safetensors")
    save_file(poison, folder / "consolidated-00001-of-00001.safetensors")
    with opened(folder) as checkpoint:
        assert all(torch.isfinite(tensor).all() for _, tensor in checkpoint.weights(None))


def test_shards_without_an_index_must_be_complete(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    for n in (1, 2):
        save_file({f"t{n}": torch.zeros(1)}, folder / f"model-{n:05}-of-00002.safetensors")
    save_file({"t1": torch.zeros(1)}, folder / "consolidated.safetensors")
    with opened(folder) as checkpoint:
        assert checkpoint.weight_names() == ["t1", "t2"]
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="1 of 2 shards"):
        opened(folder)


def test_pickled_weights_are_refused_and_not_opened(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    marker = tmp_path / "ran"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (marker.write_text, ("x",))

    torch.save(Payload(), folder / "pytorch_model.bin")
    for path in (folder, folder / "pytorch_model.bin"):
        with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin: pickled weights"):
            SafetensorsLoader().open(path)
    assert not marker.exists()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        SafetensorsLoader().open(tmp_path)
    with pytest.raises(ModelLoadError, match="has no weights"):
        SafetensorsLoader().open(folder_with(tmp_path))
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ModelLoadError, match=r"config\.json: not valid JSON"):
        SafetensorsLoader().open(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match="JSON object"):
        SafetensorsLoader().open(tmp_path)


# Metadata


def complete(tmp_path: Path, **config: Any) -> Path:
    folder = folder_with(save_byte_tokenizer(tmp_path), **config)
    save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def test_end_of_sequence_is_the_union(tmp_path: Path) -> None:
    folder = complete(tmp_path, eos_token_id=2, text_config={"eos_token_id": 5})
    dump(folder / "generation_config.json", {"eos_token_id": [2, 7], "temperature": 0.6})
    with opened(folder) as checkpoint:
        assert checkpoint.eos_token_ids == (2, 3, 5, 7)  # the tokenizer's is <|im_end|>, id 3
        assert checkpoint.generation_config["temperature"] == 0.6


def test_tokenizer_and_its_named_tokens(tmp_path: Path) -> None:
    folder = complete(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["pad_token"] = {"content": "</s>", "special": True}
    dump(folder / "tokenizer_config.json", settings)
    with opened(folder) as checkpoint:
        spec = checkpoint.tokenizer_spec()
    assert spec is not None
    assert (spec.bos_id, spec.eos_id, spec.pad_id, spec.unk_id) == (0, 3, 1, None)
    assert spec.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "</s>"}


def test_a_named_token_that_is_an_ordinary_word_of_the_file(tmp_path: Path) -> None:
    folder = complete(tmp_path)
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    document["added_tokens"] = [entry for entry in document["added_tokens"] if entry["content"] != "<|im_end|>"]
    dump(folder / "tokenizer.json", document)
    with opened(folder) as checkpoint:
        spec = checkpoint.tokenizer_spec()
        assert checkpoint.eos_token_ids == (3,)
    assert spec is not None and spec.eos_id == 3
    tokenizer = Tokenizer(spec)
    assert 3 in tokenizer.special_ids
    assert 3 not in tokenizer.encode("a<|im_end|>") and 3 in tokenizer.encode("a<|im_end|>", allow_special=True)


def test_no_tokenizer_or_one_that_cannot_be_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    with opened(folder) as checkpoint:
        assert checkpoint.tokenizer_spec() is None and checkpoint.chat_template is None
        (folder / "tokenizer.model").write_bytes(b"x")
        with pytest.raises(ModelLoadError, match=r"tokenizer\.model but no tokenizer\.json"):
            checkpoint.tokenizer_spec()


def test_chat_template_by_precedence(tmp_path: Path) -> None:
    folder = complete(tmp_path)
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    dump(folder / "tokenizer_config.json", {"chat_template": named})
    assert opened(folder).chat_template == "D"
    dump(folder / "chat_template.json", {"chat_template": "J"})
    assert opened(folder).chat_template == "J"
    (folder / "chat_template.jinja").write_text("F")
    assert opened(folder).chat_template == "F"


def test_remote_code_is_only_reported(tmp_path: Path) -> None:
    folder = complete(tmp_path, auto_map={"AutoModel": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit")
    assert opened(folder).needs_remote_code
    assert not opened(complete(tmp_path)).needs_remote_code


# Dummy weights


def specs() -> list[WeightSpec]:
    return [WeightSpec("a", (300, 1001)), WeightSpec("b", (7,)), WeightSpec("c", (2, 3, 5))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dummy_weights_are_small_seeded_and_named(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = folder_with(tmp_path)
    loader = DummyLoader([SafetensorsLoader(), GGUFLoader()])
    assert loader.accepts(folder)
    with loader.open(folder) as checkpoint:
        first = dict(checkpoint.weights_for(specs(), dtype, seed=1))
        again = dict(checkpoint.weights_for(reversed(specs()), dtype, seed=1))
        other = dict(checkpoint.weights_for(specs(), dtype, seed=2))
    for spec in specs():
        tensor = first[spec.name]
        assert tuple(tensor.shape) == spec.shape and tensor.dtype == dtype
        assert torch.equal(tensor, again[spec.name]) and not torch.equal(tensor, other[spec.name])
        assert tensor.abs().max() <= torch.tensor(1e-3, dtype=dtype)
    assert abs(first["a"].float().mean()) < 1e-5
    assert abs(first["a"].float().std() - 1e-3 / 3**0.5) < 1e-5
    assert len(torch.unique(first["a"])) > (30_000 if dtype == torch.float32 else 500)


def test_dummy_takes_config_and_tokenizer_from_the_path(tmp_path: Path) -> None:
    folder = complete(tmp_path, eos_token_id=2)
    with DummyLoader().open(folder) as checkpoint:
        assert checkpoint.config["model_type"] == "llama" and checkpoint.eos_token_ids == (2, 3)
        assert checkpoint.tokenizer_spec() is not None
        with pytest.raises(ModelLoadError, match="weights_for"):
            list(checkpoint.weights(torch.float32))
    with pytest.raises(ModelLoadError, match=r"neither a config\.json"):
        DummyLoader().open(tmp_path / "nothing")
