"""Source `local`: a folder or file on this machine."""

from __future__ import annotations

from pathlib import Path

from hotswap.core.contracts.source import ModelLoadError, Report, Source


class LocalSource(Source):
    """An existing path, or a string that can only be meant as one (`./x`, `~/x`, `/x`, `x.gguf`)."""

    name = "local"

    def accepts(self, model: str) -> bool:
        if not model or "\0" in model:
            return False
        return model.startswith(("/", "./", "../", "~")) or model.endswith(".gguf") or Path(model).exists()

    def fetch(self, model: str, *, revision: str | None, cache_dir: Path, report: Report | None) -> Path:
        """The path itself, absolute. A revision means nothing for what is already here."""
        try:
            path = Path(model).expanduser()
        except RuntimeError as error:
            raise ModelLoadError(f"{model}: {error}") from error
        if not path.exists():
            raise ModelLoadError(f"{model}: no such file or folder")
        return path.resolve()
