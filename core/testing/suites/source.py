"""What every source must hold: it writes inside the cache only, whole or not at all, and says plainly what it cannot have.

    from hotswap.core.testing.suites import SourceSuite

    class TestMySource(SourceSuite):
        plugin = "hotswap_my_source"

        def make_model(self, folder):       # optional: something that can be fetched without a network
            (folder / "tiny").mkdir()
            return "my_source:tiny"

        def options_for(self, folder):
            return {"root": folder}

Nothing here reaches a network: sockets are closed, and so are the ways out of child processes.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ...contracts.source import CachedModel, ModelLoadError, Report, Source, UsageError
from ...plugin_options import validated_options
from .base import ConformanceSuite

_STRINGS: tuple[str, ...] = (
    "",
    ".",
    "..",
    "/",
    "~",
    "a",
    "a b",
    "a/b",
    "a/b/c",
    "x:y",
    "a\0b",
    "\n",
    "é/ü",
    "C:\\x",
    "a" * 5000,
    "$(x)",
)
_STRINGS += ("http://a/b", "file:///x", "-r", "--help", "a/../b", "../x", "pypi:", "org/name:", "x.gguf", "s3://b/k")
_LAST_NAMES: tuple[str, ...] = (
    "../../../escaped",
    "..",
    "a/../../../../escaped",
    "a\0b",
    "",
    "-r",
    "--help",
    "a;touch escaped",
)
_LAST_NAMES += ("$(touch escaped)", "a\nb", "a" * 5000, "%2e%2e%2fescaped", "..\\..\\escaped", "./../../../escaped")


class Interrupted(BaseException):
    """As if the user had pressed Ctrl-C."""


class SourceSuite(ConformanceSuite):
    """model: an argument of the source's form; found by trying when it is empty. interruptions: places at which a fetch is
    broken off."""

    kind: ClassVar[str] = "source"
    model: ClassVar[str] = ""
    interruptions: ClassVar[int] = 20

    # For authors.

    def make_model(self, folder: Path) -> str | None:
        """Puts a small model where the source looks, under the existing `folder`, and returns the argument that names it.
        None: nothing can be fetched here, and the checks that fetch are skipped. By default a folder, if its path will do.
        """
        target = folder / "tiny"
        (target / "deeper").mkdir(parents=True)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(os.urandom(300_000))
        (target / "deeper" / "more.json").write_text("[]")
        return str(target) if self.build().accepts(str(target)) else None

    def options_for(self, folder: Path) -> Mapping[str, Any]:
        """The plugin's options for what `make_model` put into `folder`."""
        return self.options

    # Building.

    @pytest.fixture(autouse=True)
    def _no_network(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
        """No way out, and a working folder of its own."""

        def unreachable(*_: Any, **__: Any) -> Any:
            raise OSError(101, "Network is unreachable")

        for name in ("connect", "connect_ex"):
            monkeypatch.setattr(socket.socket, name, unreachable)
        for name in ("getaddrinfo", "create_connection", "gethostbyname"):
            monkeypatch.setattr(socket, name, unreachable)
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "HF_HUB_OFFLINE": "1"}.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "cwd").mkdir()
        monkeypatch.chdir(tmp_path / "cwd")
        yield

    def source(self, folder: Path | None = None) -> Source:
        """A new one, with the options for `folder`."""
        if folder is None:
            made: Source = self.build()
        else:
            options = validated_options(self.registered(), self.options_for(folder), "options_for")
            made = self.build(options=options)
        return made

    @pytest.fixture
    def fetchable(self, tmp_path: Path) -> tuple[Path, str]:
        """The folder that `make_model` filled, and the argument that it gave."""
        folder = tmp_path / "origin"
        folder.mkdir()
        model = self.make_model(folder)
        if model is None:
            pytest.skip("nothing can be fetched without a network: make_model says what could be")
        return folder, model

    def example(self) -> str:
        """An argument of the source's form that names nothing."""
        name = self.registered().provider.name
        source = self.source()
        nothing = "no-such-model-anywhere"
        for candidate in (self.model, f"{name}:{nothing}", f"./{nothing}", f"no-such-org/{nothing}"):
            if candidate and source.accepts(candidate):
                return candidate
        pytest.fail("set `model` to an argument of the source's form that names nothing", pytrace=False)

    def fetch(self, source: Source, model: str, cache: Path, report: Report | None = None) -> Path:
        return source.fetch(model, revision=None, cache_dir=cache, report=report)

    # The tests.

    def test_accepts_is_pure(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`accepts` answers for any string, the same each time, without a network, and writes nothing."""

        def closed(*_: Any, **__: Any) -> Any:
            pytest.fail("accepts() opened a socket", pytrace=False)

        for name in ("socket", "getaddrinfo", "create_connection"):
            monkeypatch.setattr(socket, name, closed)
        source, before = self.source(), _tree(tmp_path)
        for model in (*_STRINGS, self.example()):
            answers = [source.accepts(model) for _ in range(2)]
            assert answers[0] is answers[1] and isinstance(answers[0], bool), f"accepts({model[:40]!r}) gave {answers}"
        assert _tree(tmp_path) == before, "accepts() wrote something"

    def test_accepts_its_own_form_only(self) -> None:
        """It accepts its own form, and not the empty string."""
        assert self.source().accepts(self.example())
        assert not self.source().accepts("")

    def test_missing_is_an_error_for_the_reader(self, tmp_path: Path) -> None:
        """What cannot be had is a UsageError or ModelLoadError that names it, in a line or two; nothing is left."""
        cache = tmp_path / "cache"
        model = self.example()
        with pytest.raises((UsageError, ModelLoadError)) as caught:
            self.fetch(self.source(), model, cache)
        name = model.replace("/", ":").split(":")[-1]
        assert name in str(caught.value), f"the message does not name {name}: {caught.value}"
        assert len(str(caught.value)) < 2000 and "Traceback" not in str(caught.value)
        assert not [path for path in cache.rglob("*") if path.is_file()], "it left a file for what it could not have"

    def test_hostile_names_are_refused(self, tmp_path: Path) -> None:
        """A name with `..`, a control character, an option or a shell's characters is refused or looked for as it is;
        nothing is written outside the cache."""
        model = self.example()
        cache = tmp_path / "deep" / "er" / "still" / "cache"
        cache.mkdir(parents=True)
        before = _tree(tmp_path, leave_out=cache)
        stems = {model[: model.rindex(separator) + 1] for separator in ":/" if separator in model}
        source = self.source()
        for stem in sorted(stems):
            for name in _LAST_NAMES:
                if source.accepts(stem + name):
                    try:
                        found = self.fetch(source, stem + name, cache)
                    except (UsageError, ModelLoadError):
                        pass
                    else:
                        assert found.exists(), f"{stem + name[:40]!r}: gave {found}, which does not exist"
                assert _tree(tmp_path, leave_out=cache) == before, f"{stem + name[:40]!r} wrote outside the cache"

    def test_fetch_gives_what_was_asked_for(self, fetchable: tuple[Path, str], tmp_path: Path) -> None:
        """`fetch` gives an absolute path that exists, inside the cache or where the model was all along."""
        folder, model = fetchable
        cache = tmp_path / "cache"
        found = self.fetch(self.source(folder), model, cache)
        assert isinstance(found, Path) and found.is_absolute() and found.exists()
        assert found.resolve().is_relative_to(cache.resolve()) or found.resolve().is_relative_to(folder.resolve())

    def test_what_is_whole_is_not_fetched_again(self, fetchable: tuple[Path, str], tmp_path: Path) -> None:
        """A second fetch gives the same path and touches no file, in this process or a later one."""
        folder, model = fetchable
        cache = tmp_path / "cache"
        found = self.fetch(self.source(folder), model, cache)
        before = _stamps(cache)
        assert self.fetch(self.source(folder), model, cache) == found
        assert _stamps(cache) == before, "it was fetched again"

    def test_an_interrupted_fetch_leaves_nothing_half(self, fetchable: tuple[Path, str], tmp_path: Path) -> None:
        """Wherever a fetch is broken off, the next one gives the whole model."""
        folder, model = fetchable
        whole = _contents(self.fetch(self.source(folder), model, tmp_path / "whole"))
        total = _lines_of(lambda: self.fetch(self.source(folder), model, tmp_path / "counted"))
        for part in range(self.interruptions):
            cache = tmp_path / f"cache-{part}"
            self._break_off(folder, model, cache, after=1 + (part + 1) * total // (self.interruptions + 1))
            found = self.fetch(self.source(folder), model, cache)
            assert _contents(found) == whole, f"broken off at place {part} of {self.interruptions}: not the whole model"

    def _break_off(self, folder: Path, model: str, cache: Path, after: int) -> None:
        source = self.source(folder)
        try:
            _lines_of(lambda: self.fetch(source, model, cache), stop=after)
        except (Interrupted, ModelLoadError, UsageError):
            return

    def test_cached_looks_at_the_disk_only(self, tmp_path: Path) -> None:
        """`cached` lists what is on this machine, from an empty or damaged cache too, and changes nothing there."""
        for name in ("absent", "empty", "damaged"):
            cache = tmp_path / name
            if name != "absent":
                cache.mkdir()
            if name == "damaged":
                for folder in ("models", self.registered().provider.name):
                    (cache / folder / "x").mkdir(parents=True)
                    (cache / folder / "y").write_bytes(b"\0")
            before = _tree(tmp_path)
            for found in self.source().cached(cache):
                assert isinstance(found, CachedModel) and found.path.is_absolute()
            assert _tree(tmp_path) == before, "cached() changed the cache"

    def test_progress_is_in_bytes(self, fetchable: tuple[Path, str], tmp_path: Path) -> None:
        """`report` gets a stage, the bytes done and the total, which is 0 while it is unknown."""
        folder, model = fetchable
        calls: list[tuple[Any, Any, Any]] = []
        self.fetch(self.source(folder), model, tmp_path / "cache", lambda *call: calls.append(call))
        for stage, done, total in calls:
            assert isinstance(stage, str) and stage
            assert type(done) is int and type(total) is int and done >= 0 and (total == 0 or done <= total)

    def test_a_cache_that_cannot_be_written_is_said(self, fetchable: tuple[Path, str], tmp_path: Path) -> None:
        """A cache folder that is a file is a ModelLoadError, not an OSError."""
        folder, model = fetchable
        cache = tmp_path / "cache"
        cache.write_text("in the way")
        try:
            found = self.fetch(self.source(folder), model, cache)
        except (ModelLoadError, UsageError):
            return
        assert found.exists(), "it gave a path that does not exist"


def _tree(folder: Path, leave_out: Path | None = None) -> list[str]:
    """Everything in a folder, by name."""
    return sorted(str(path) for path in folder.rglob("*") if leave_out is None or not path.is_relative_to(leave_out))


def _stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for path in folder.rglob("*"):
        facts = path.stat()
        if path.is_file():
            found[str(path)] = (facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns)
    return found


def _contents(path: Path) -> dict[str, bytes]:
    """Each file's content, by its place in the folder."""
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def _lines_of(function: Any, stop: int = 0) -> int:
    """Runs it and counts the lines of Python that it takes; with `stop`, raises Interrupted in that one."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == stop:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
