"""Sources with one fault each: variants of one that copies a folder of this machine into the cache."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

from ...contracts.provider import Provider
from ...contracts.source import ModelLoadError, Report, Source
from . import BrokenSample


class Copies(Source):
    """Right: a path, copied under its last name."""

    name = "copies"

    def accepts(self, model: str) -> bool:
        return "\0" not in model and model.startswith(("/", "./"))

    def fetch(self, model: str, *, revision: str | None, cache_dir: Path, report: Report | None) -> Path:
        name = Path(model).name
        try:
            if not name or name == ".." or not Path(model).is_dir():
                raise ModelLoadError(f"{model}: no such folder")
            target = cache_dir / name
            if not self.is_whole(target):
                cache_dir.mkdir(parents=True, exist_ok=True)
                self.copy(Path(model), target)
        except OSError as error:
            raise ModelLoadError(f"{model}: {error}") from error
        return target

    def is_whole(self, target: Path) -> bool:
        return target.is_dir()

    def copy(self, origin: Path, target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            os.replace(shutil.copytree(origin, Path(scratch, "x")), target)


class CopiesInPlace(Copies):
    """Takes a folder that is there for a whole one, and fills it file by file."""

    def copy(self, origin: Path, target: Path) -> None:
        shutil.copytree(origin, target)


class FetchesAgain(Copies):
    """Copies each time."""

    def is_whole(self, target: Path) -> bool:
        shutil.rmtree(target, ignore_errors=True)
        return False


class LetsErrorsThrough(Copies):
    """The operating system's error reaches the reader as it is."""

    def fetch(self, model: str, *, revision: str | None, cache_dir: Path, report: Report | None) -> Path:
        os.stat(model)
        return super().fetch(model, revision=revision, cache_dir=cache_dir, report=report)


class WritesOutsideTheCache(Source):
    """Takes what the user wrote for a name in the cache, whatever it is."""

    name = "writes_outside"

    def accepts(self, model: str) -> bool:
        return model.startswith("writes_outside_the_cache:")

    def fetch(self, model: str, *, revision: str | None, cache_dir: Path, report: Report | None) -> Path:
        name = model.partition(":")[2]
        try:
            (cache_dir / "models").mkdir(parents=True, exist_ok=True)
            (cache_dir / "models" / name).mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{model}: {error}") from error
        raise ModelLoadError(f"{model}: nothing there")


class AsksTheNetwork(Copies):
    """Looks on a server whether a string is one of its names."""

    def accepts(self, model: str) -> bool:
        try:
            socket.create_connection(("models.invalid", 443), timeout=1)
        except OSError:
            return super().accepts(model)
        return True


class GivesARelativePath(Copies):
    """Right where it was fetched, wrong in a process with another working folder."""

    def fetch(self, model: str, *, revision: str | None, cache_dir: Path, report: Report | None) -> Path:
        found = super().fetch(model, revision=revision, cache_dir=cache_dir, report=report)
        return Path(os.path.relpath(found))


def _sample(name: str, source: type[Source], caught_by: str) -> BrokenSample:
    return BrokenSample(name, Provider(name=name, build=lambda context: source(), summary=f"broken: {name}"), caught_by)


BROKEN: tuple[BrokenSample, ...] = (
    _sample("copies_in_place", CopiesInPlace, "an_interrupted_fetch_leaves_nothing_half"),
    _sample("fetches_again", FetchesAgain, "what_is_whole_is_not_fetched_again"),
    _sample("lets_errors_through", LetsErrorsThrough, "missing_is_an_error_for_the_reader"),
    _sample("writes_outside_the_cache", WritesOutsideTheCache, "hostile_names_are_refused"),
    _sample("asks_the_network", AsksTheNetwork, "accepts_is_pure"),
    _sample("gives_a_relative_path", GivesARelativePath, "fetch_gives_what_was_asked_for"),
)
