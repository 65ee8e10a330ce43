"""Source `my_source`: `my_source:NAME`, a folder of a shared disk, copied into the cache before it is used."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from pydantic import BaseModel, Field

from hotswap.core.contracts import ModelLoadError, Provider, Report, Source, SourceContext, UsageError, hookimpl

PREFIX = "my_source:"


class MySourceOptions(BaseModel):
    root: Path = Field(Path("/srv/models"), description="The folder that holds the models, a folder each.")


class MySource(Source):
    name = "my_source"

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser()

    def accepts(self, model: str) -> bool:
        return model.startswith(PREFIX)

    def fetch(self, model: str, *, revision: str | None, cache_dir: Path, report: Report | None) -> Path:
        name = model.removeprefix(PREFIX)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", name):  # nothing that could leave the folder
            raise UsageError(f"{model}: not a model of this kind (my_source:NAME)")
        if revision is not None:
            raise UsageError(f"{model}: has no revisions; {revision!r} was asked for")
        target = cache_dir.expanduser() / "my_source" / name
        if target.is_dir():
            return target
        if not (self._root / name).is_dir():
            raise ModelLoadError(f"{model}: there is no folder {self._root / name}")
        if report is not None:
            report(f"copying {name}", 0, 0)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as scratch:
                copied = shutil.copytree(self._root / name, Path(scratch) / name)
                os.replace(copied, target)  # whole or not at all
        except OSError as error:
            raise ModelLoadError(f"{target}: cannot be written: {error}") from error
        return target


def build(context: SourceContext) -> Source:
    return MySource(cast(MySourceOptions, context.options).root)  # validated by hotswap


@hookimpl
def hotswap_source() -> Iterator[Provider[Source]]:
    yield Provider(name="my_source", build=build, options=MySourceOptions, summary="my_source:NAME on a shared disk.")
