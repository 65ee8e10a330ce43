"""The built-in sources, and the example of the docs, pass the conformance suite."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.contracts import Provider
from hotswap.core.testing.broken.source import Copies
from hotswap.core.testing.suites import SourceSuite

PROVIDERS = "hotswap.plugins.loaders.providers"
CONTENT = bytes(range(256)) * 4000


def pypi_with_a_tiny_package(context: Any) -> Any:
    from hotswap.plugins.loaders.source_pypi import PackageModel, PypiSource

    pinned = PackageModel("1.2", "tiny_model/model.gguf", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
    return PypiSource({"tiny-model": pinned})


class TestLocal(SourceSuite):
    plugin = PROVIDERS
    name = "local"


class TestHub(SourceSuite):
    plugin = PROVIDERS
    name = "hub"


class TestPypi(SourceSuite):
    plugin = PROVIDERS
    name = "pypi"


@pytest.mark.full
class TestPypiWithAWheel(SourceSuite):
    """The same source over another table, with a real pip that sees one folder and no network."""

    plugin = Provider(name="pypi", build=pypi_with_a_tiny_package, summary="pypi with a tiny package")
    interruptions = 12  # each is two runs of pip

    @pytest.fixture(autouse=True)
    def _wheels(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "origin"))
        yield

    def make_model(self, folder: Path) -> str | None:
        info = "tiny_model-1.2.dist-info"
        with zipfile.ZipFile(folder / "tiny_model-1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny_model/model.gguf", CONTENT)
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.2\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        return "pypi:tiny-model"


class TestExample(SourceSuite):
    plugin = "hotswap.core.testing.templates.source"

    def make_model(self, folder: Path) -> str | None:
        (folder / "tiny").mkdir()
        (folder / "tiny" / "config.json").write_text("{}")
        (folder / "tiny" / "model.safetensors").write_bytes(CONTENT)
        return "my_source:tiny"

    def options_for(self, folder: Path) -> Mapping[str, Any]:
        return {"root": str(folder)}


class TestWhatTheBrokenSamplesAreMadeOf(SourceSuite):
    plugin = Provider(name="copies", build=lambda context: Copies(), summary="copies a folder into the cache")
