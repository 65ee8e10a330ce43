"""`hotswap pull` and `hotswap list`: what is in the caches, what of it is damaged, and that nothing is fetched twice."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.contracts.source import CachedModel, Source
from hotswap.core.errors import UsageError
from hotswap.core.testing.tiny_models import make_tiny_model
from hotswap.plugins.loaders.hub_cache import cached_models
from hotswap.plugins.loaders.source_hub import HubSource, _reporting
from hotswap.plugins.loaders.source_local import LocalSource
from hotswap.plugins.loaders.source_pypi import PackageModel, PypiSource
from hotswap.server.cli.list_models import age
from hotswap.server.cli.main import main
from hotswap.server.cli.pull import readable

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT = b"GGUF" + bytes(1000)
PINNED = PackageModel("1.2", "pkg/model.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


class HubCache:
    """A cache in the hub's layout."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, name: str, files: dict[str, bytes], *, ref: str = "main", commit: str = COMMIT) -> Path:
        repository = self.root / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / commit
        for file, content in files.items():
            blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(content)
            link = snapshot / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
        if ref:
            (repository / "refs").mkdir(exist_ok=True)
            (repository / "refs" / ref).write_text(commit)
        return snapshot

    def listed(self) -> dict[str, CachedModel]:
        return {model.name: model for model in cached_models(self.root)}


@pytest.fixture
def hub(tmp_path: Path) -> HubCache:
    return HubCache(tmp_path / "hub")


# The hub's cache.


def test_a_whole_model(hub: HubCache) -> None:
    snapshot = hub.add("org/name", {"config.json": b"{}", "model.safetensors": bytes(500)})
    (model,) = cached_models(hub.root)
    assert (model.name, model.path, model.num_bytes, model.format) == ("org/name", snapshot, 502, "safetensors")
    assert model.damage == "" and model.revision is None and model.used_at > 0


def test_revisions_are_told(hub: HubCache) -> None:
    weights = {"config.json": b"{}", "model.safetensors": b"x"}
    hub.add("org/name", weights)
    hub.add("org/name", weights, ref="v2", commit="2" * 40)
    hub.add("org/name", weights, ref="", commit="3" * 40)
    assert [model.revision for model in cached_models(hub.root)] == [None, "v2", "3" * 40]


def test_gguf_repositories_file_by_file(hub: HubCache) -> None:
    parts = {f"big-{number:05}-of-00003.gguf": bytes([number]) * 10 for number in (1, 2)}
    snapshot = hub.add("org/q", {"m-Q4_K_M.gguf": bytes(7), "best-of-breed.gguf": bytes(8), "README.md": b"", **parts})
    found = hub.listed()
    assert set(found) == {"org/q:m-Q4_K_M.gguf", "org/q:best-of-breed.gguf", "org/q:big-00001-of-00003.gguf"}
    assert found["org/q:m-Q4_K_M.gguf"].path == snapshot / "m-Q4_K_M.gguf"
    assert (found["org/q:m-Q4_K_M.gguf"].num_bytes, found["org/q:m-Q4_K_M.gguf"].damage) == (7, "")
    assert found["org/q:big-00001-of-00003.gguf"].damage == "1 of 3 parts are missing"


def test_damage(hub: HubCache) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    hub.add("org/shards", {"config.json": b"{}", "model-1.safetensors": b"a", "model.safetensors.index.json": index})
    snapshot = hub.add("org/blob", {"config.json": b"{}", "model.safetensors": b"abc"})
    (snapshot / "model.safetensors").resolve().unlink()
    hub.add("org/pickle", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.add("org/bare", {"model.safetensors": b"y"})
    hub.add("org/index", {"config.json": b"{}", "model.safetensors": b"z", "model.safetensors.index.json": b"[]"})
    hub.add("org/deep", {"config.json": b"{}", "a.safetensors": b"d", "model.safetensors.index.json": b"[" * 200_000})
    odd = hub.add(
        "org/odd",
        {"config.json": b"{}", "b.safetensors": b"o", "model.safetensors.index.json": b'{"weight_map": {"a": 7}}'},
    )
    (odd / "b.safetensors").resolve().unlink()
    (hub.root / "models--org--begun" / "blobs").mkdir(parents=True)
    (hub.root / "models--org--begun" / "blobs" / "aa.incomplete").write_bytes(bytes(9))
    (hub.root / "models--org--empty").mkdir()
    damages = {name: model.damage for name, model in hub.listed().items()}
    assert damages == {
        "org/shards": "model-2.safetensors missing",
        "org/blob": "model.safetensors missing",
        "org/pickle": "no weights in a form that is read: neither safetensors nor GGUF",
        "org/bare": "no config.json",
        "org/index": "",
        "org/deep": "",
        "org/odd": "7 and 1 more missing",
        "org/begun": "a download was interrupted",
        "org/empty": "there is no snapshot of it",
    }
    assert hub.listed()["org/begun"].num_bytes == 9


def test_what_is_no_model_is_passed_over(hub: HubCache) -> None:
    assert cached_models(hub.root) == []
    (hub.root / "datasets--org--x" / "snapshots").mkdir(parents=True)
    (hub.root / "models--gpt2").mkdir()
    (hub.root / "models--a--file").write_text("")
    (hub.root / ".locks").mkdir()
    assert cached_models(hub.root) == []


# Other sources.


def test_the_package_cache(tmp_path: Path) -> None:
    source = PypiSource({"tiny-model": PINNED})
    assert source.cached(tmp_path) == []
    folder = tmp_path / "models" / "tiny-model-1.2"
    folder.mkdir(parents=True)
    assert source.cached(tmp_path)[0].damage == "the file is missing: a download was interrupted"
    file = folder / "model.gguf"
    file.write_bytes(CONTENT)
    (model,) = source.cached(tmp_path)
    assert (model.name, model.path, model.num_bytes, model.format) == ("pypi:tiny-model", file, len(CONTENT), "gguf")
    assert model.damage == "" and model.used_at > 0
    assert list(folder.iterdir()) == [file]  # a listing writes nothing
    file.write_bytes(CONTENT[:-1] + b"x")
    assert source.cached(tmp_path)[0].damage == "its content is not what was pinned"
    file.write_bytes(b"short")
    assert source.cached(tmp_path)[0].damage == f"5 bytes instead of {len(CONTENT)}"


def test_a_source_keeps_nothing_unless_it_says_so(tmp_path: Path) -> None:
    class Bare(Source):
        name = "bare"

        def accepts(self, model: str) -> bool:
            return False

        def fetch(self, model: str, **_: Any) -> Path:
            raise NotImplementedError

    assert list(Bare().cached(tmp_path)) == []
    assert list(LocalSource().cached(tmp_path)) == []


def test_a_revision_belongs_to_a_hub_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--revision v2: .* is a path, and a revision belongs to a hub model"):
        LocalSource().fetch(str(tmp_path), revision="v2", cache_dir=tmp_path, report=None)


def test_bytes_of_a_download_are_reported() -> None:
    reports: list[tuple[str, int, int]] = []
    bar_class = _reporting(lambda *step: reports.append(step), "downloading org/name")
    with bar_class(total=100, unit="B", mininterval=0, miniters=1, name="hub") as bar:
        bar.update(40)
        bar.update(60)
    with bar_class(total=3, unit="it", mininterval=0, miniters=1) as files:
        files.update(1)
    assert ("downloading org/name", 40, 100) in reports and reports[-1] == ("downloading org/name", 100, 100)
    assert {total for _, _, total in reports} == {100}


# The commands.


@pytest.fixture
def caches(hub: HubCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flags with which commands look at caches of this test's own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.root))
    return ["--download-dir", str(tmp_path / "packages")]


def test_list(hub: HubCache, caches: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *caches]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "`hotswap pull MODEL` fetches one" in captured.err
    snapshot = hub.add("org/name", {"config.json": b"{}", "model.safetensors": bytes(1500)})
    hub.add("org/name", {"config.json": b"{}"}, ref="v2", commit="2" * 40)
    assert main(["list", *caches]) == 0
    text = capsys.readouterr().out
    assert "org/name                1.5 kB  safetensors  just now  whole" in text
    assert "org/name --revision v2: damaged: no weights" in text
    assert "`hotswap pull org/name --revision v2` fetches it again" in text
    assert main(["list", "--json", *caches]) == 0
    whole, damaged = json.loads(capsys.readouterr().out)
    assert whole.pop("used_at") > 0
    assert whole == {
        "name": "org/name",
        "revision": None,
        "serve": "org/name",
        "path": str(snapshot),
        "bytes": 1502,
        "format": "safetensors",
        "damage": None,
    }
    assert damaged["serve"] == "org/name --revision v2" and damaged["damage"].startswith("no weights")


def test_a_source_that_fails_does_not_hide_the_others(
    hub: HubCache, caches: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/name", {"config.json": b"{}", "model.safetensors": bytes(10)})

    def broken(self: PypiSource, cache_dir: Path) -> list[CachedModel]:
        raise PermissionError("not yours")

    monkeypatch.setattr(PypiSource, "cached", broken)
    assert main(["list", *caches]) == 0
    assert "org/name" in capsys.readouterr().out


def test_pull_of_a_path(tmp_path: Path, caches: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "model")
    assert main(["pull", str(model), *caches]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{model}\n" and "is on this machine: nothing to fetch" in captured.err
    assert main(["pull", str(model), "--revision", "v2", *caches]) == 2
    assert "a revision belongs to a hub model" in capsys.readouterr().err
    assert main(["pull", str(tmp_path / "nowhere"), *caches]) == 1
    assert "no such file or folder" in capsys.readouterr().err


def test_pull_and_pull_again(
    tmp_path: Path,
    hub: HubCache,
    caches: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first call has a hub to talk to; offline, the second says that the model is there."""
    tiny = make_tiny_model(tmp_path / "model")
    files = {file.name: file.read_bytes() for file in tiny.iterdir() if file.is_file()}
    monkeypatch.setattr(HubSource, "_list_files", lambda self, repository, revision: list(files))

    def snapshot(self: HubSource, *_: Any, **__: Any) -> Path:
        folder = hub.root / "models--org--tiny" / "snapshots" / COMMIT
        return folder if folder.is_dir() else hub.add("org/tiny", files)

    monkeypatch.setattr(HubSource, "_snapshot", snapshot)
    assert main(["pull", "org/tiny", *caches]) == 0
    first = capsys.readouterr()
    assert "hotswap: org/tiny: fetched (" in first.err and "downloading org/tiny" in first.err
    assert Path(first.out.strip()).joinpath("config.json").is_file()
    monkeypatch.setattr(HubSource, "_list_files", lambda self, repository, revision: None)
    assert main(["pull", "org/tiny", *caches]) == 0
    second = capsys.readouterr()
    assert "hotswap: org/tiny is there already (" in second.err and second.out == first.out


def test_words_for_sizes_and_ages() -> None:
    assert [readable(size) for size in (0, 999, 1500, 98_362_432, 3 * 10**12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "98.4 MB",
        "3.0 TB",
    ]
    assert [age(seconds) for seconds in (0, 61, 7300, 86_400, 200_000)] == [
        "just now",
        "1 minute ago",
        "2 hours ago",
        "1 day ago",
        "2 days ago",
    ]
