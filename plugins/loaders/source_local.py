"""Source `local`: a folder or file on this machine."""

from __future__ import annotations

from pathlib import Path

from hotswap.core.contracts.source import ModelLoadError, Report, Source, UsageError


class LocalSource(Source):
    """An existing path, or a string that can only be meant as one (`./x`, `~/x`, `/x`, `x.gguf`)."""

    name = "local"

    def accepts(self, model: str) -> bool:
        if not model or "\0" in model:
            return False
        return model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf") or _exists(Path(model))

    def fetch(self, model: str, *, revision: str | None, cache_dir: Path, report: Report | None) -> Path:
        """The path itself, absolute. Raises UsageError for a revision: what is here has none to choose from."""
        if revision is not None:
            raise UsageError(
                f"--revision {revision}: {model} is a path, and a revision belongs to a hub model; leave it out"
            )
        try:
            path = Path(model).expanduser()
        except RuntimeError as error:
            raise ModelLoadError(f"{model}: {error}") from error
        if not _exists(path):
            raise ModelLoadError(f"{model}: no such file or folder")
        return path.resolve()


def _exists(path: Path) -> bool:
    """False also for what can be no path here, such as a name that is too long."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
