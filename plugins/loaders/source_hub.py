"""Source `hub`: a repository of the Hugging Face hub, `org/name`, or one file of it, `org/name:FILE`."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hotswap.core.contracts.source import CachedModel, ModelLoadError, Report, Source, UsageError

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_METADATA = ("*.json", "*.jinja", "tokenizer.model", "*.txt")
_IGNORED = ("consolidated*", "original/*", "onnx/*", "*/*")


class HubSource(Source):
    """Downloads into the hub's own shared cache (HF_HOME), as every other tool does, unless `hub_cache` is given."""

    name = "hub"

    def __init__(self, hub_cache: Path | None = None, *, with_code: bool = False) -> None:
        """with_code: take the repository's Python files along, because the operator trusts them."""
        self._hub_cache = hub_cache
        self._metadata = (*_METADATA, "*.py") if with_code else _METADATA

    def accepts(self, model: str) -> bool:
        repository, _, file = model.partition(":")
        return bool(_REPOSITORY.fullmatch(repository)) and (not file or bool(_FILE.fullmatch(file)))

    def fetch(self, model: str, *, revision: str | None, cache_dir: Path, report: Report | None) -> Path:
        """The folder of the snapshot, or the GGUF file that was named. `cache_dir` is not used: see the class."""
        if not self.accepts(model):
            raise UsageError(f"{model}: not a hub repository (org/name or org/name:FILE)")
        repository, _, file = model.partition(":")
        if ".." in repository or ".." in file:
            raise UsageError(f"{model}: not a hub repository (org/name or org/name:FILE)")
        files = self._list_files(repository, revision)
        if files is None:
            return self._cached(model, repository, file, revision)
        chosen = _choose(model, files, file, self._metadata)
        if report is not None:
            report(f"downloading {model}", 0, 0)
        folder = self._snapshot(model, repository, revision, patterns=chosen, local_only=False, report=report)
        return folder / chosen[0] if file else folder

    def cached(self, cache_dir: Path) -> Sequence[CachedModel]:
        """What is in the hub's cache, whoever put it there."""
        from huggingface_hub import constants

        from .hub_cache import cached_models

        return cached_models(self._hub_cache or Path(constants.HF_HUB_CACHE))

    def _list_files(self, repository: str, revision: str | None) -> list[str] | None:
        """The repository's files, or None when the hub cannot be reached."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HTTPError,  # of the HTTP library that this version of the hub's library uses: there have been three
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        try:
            info = HfApi().model_info(repository, revision=revision)
        except GatedRepoError:
            raise ModelLoadError(f"{repository}: access has to be asked for on the hub; then set HF_TOKEN") from None
        except RepositoryNotFoundError:
            raise ModelLoadError(
                f"{repository}: no such repository on the hub, or it is private and HF_TOKEN is not set"
            ) from None
        except RevisionNotFoundError:
            raise ModelLoadError(f"{repository}: has no revision {revision!r}") from None
        except HfHubHTTPError as error:
            raise ModelLoadError(f"{repository}: the hub answered {error.response.status_code}") from error
        except (OSError, HTTPError):
            return None
        return [sibling.rfilename for sibling in info.siblings or ()]

    def _cached(self, model: str, repository: str, file: str, revision: str | None) -> Path:
        folder = self._snapshot(model, repository, revision, patterns=None, local_only=True)
        if not file:
            return folder
        present = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))
        return folder / _choose(model, present, file)[0]

    def _snapshot(
        self,
        model: str,
        repository: str,
        revision: str | None,
        *,
        patterns: list[str] | None,
        local_only: bool,
        report: Report | None = None,
    ) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError

        try:
            folder = snapshot_download(
                repository,
                revision=revision,
                cache_dir=self._hub_cache,
                allow_patterns=patterns,
                local_files_only=local_only,
                **({} if report is None else {"tqdm_class": _reporting(report, f"downloading {model}")}),
            )
        except LocalEntryNotFoundError:
            raise ModelLoadError(
                f"{model}: the hub cannot be reached and the model is not in its cache; "
                "give a local path, or go online (is HF_HUB_OFFLINE set?)"
            ) from None
        except (HTTPError, OSError) as error:
            raise ModelLoadError(f"{model}: the download failed: {_first_line(error)}") from error
        return Path(folder)


def _reporting(report: Report, what: str) -> type[Any]:
    """A progress bar of the hub's library that draws nothing and reports bytes."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Reporting(tqdm):  # type: ignore[misc]  # it comes without types
        def __init__(self, *args: Any, **settings: Any) -> None:
            settings.pop("name", None)  # a word of the hub's own subclass
            super().__init__(*args, **{**settings, "file": io.StringIO()})

        def display(self, *args: Any, **settings: Any) -> bool:
            if self.unit == "B":
                report(what, int(self.n), int(self.total or 0))
            return True

    return Reporting


def _choose(model: str, files: list[str], file: str, metadata: Sequence[str] = _METADATA) -> list[str]:
    """The files to have. With `file`, a GGUF file's name or the quantization in it; its parts are taken along.

    metadata: patterns of what goes with the weights of a folder.
    """
    gguf = sorted(name for name in files if name.endswith(".gguf"))
    if file:
        matches = [name for name in gguf if name == file] or [name for name in gguf if file.lower() in name.lower()]
        stems = {re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", name) for name in matches}
        if len(stems) != 1:
            found = f"{len(stems)} files match" if matches else "no file matches"
            raise ModelLoadError(f"{model}: {found}; the repository has {', '.join(gguf) or 'no GGUF files'}")
        return matches
    top = [name for name in files if not any(fnmatch(name, pattern) for pattern in _IGNORED)]
    weights = [name for name in top if name.endswith(".safetensors")]
    if not weights:
        if gguf:
            raise ModelLoadError(
                f"{model}: holds GGUF files; name one, as in {model}:{gguf[0]} (there are {', '.join(gguf)})"
            )
        if any(name.endswith((".bin", ".pt", ".pth")) for name in top):
            raise ModelLoadError(
                f"{model}: holds only pickled weights, which can run code when they are opened and are not read; "
                "choose a safetensors or GGUF version of the model"
            )
        raise ModelLoadError(f"{model}: holds no weights: neither safetensors nor GGUF files")
    return weights + [name for name in top if any(fnmatch(name, pattern) for pattern in metadata)]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
