"""Kind `source`: turns the model argument into a folder or file on this machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelLoadError, UsageError
from .provider import BuildContext, Provider

__all__ = ["CachedModel", "ModelLoadError", "Provider", "Report", "Source", "SourceContext", "UsageError"]

Report = Callable[[str, int, int], None]
"""report(stage, done, total): progress in bytes; total is 0 while it is unknown. Called from the fetching thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model that a source has on this machine already.

    name: what to give to `hotswap serve`. revision: what to give to --revision with it, None when it goes without.
    path: folder or file. format: "safetensors", "gguf", or "" when there is nothing to tell by. used_at: when a file of it
    was last read or written, seconds since 1970, as far as the file system knows; 0 when it does not.
    damage: why it cannot be served as it is; empty when it looks whole.
    """

    name: str
    path: Path
    num_bytes: int
    format: str
    used_at: float
    revision: str | None = None
    damage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContext(BuildContext):
    """What the `build` of a source gets."""


class Source(ABC):
    """Fetches a model. Called once at start-up, in the process that starts the engine, before a device is opened."""

    name: str

    @abstractmethod
    def accepts(self, model: str) -> bool:
        """Whether `model` is written in this source's form.

        Looks at the string and the local disk only, never the network.
        """

    @abstractmethod
    def fetch(self, model: str, *, revision: str | None, cache_dir: Path, report: Report | None) -> Path:
        """The local folder or file of `model`, fetched into `cache_dir` when it is not there yet.

        revision: a branch, tag or commit where the source has such a thing. What is already whole on disk is not
        fetched again. An interrupted fetch leaves nothing that a later one could mistake for a whole model.
        Raises UsageError when the argument can never name a model, ModelLoadError when it cannot be had now.
        """

    def cached(self, cache_dir: Path) -> Sequence[CachedModel]:
        """What it has on this machine, damaged entries among it: for `hotswap list`. None for a source that keeps nothing.

        Looks at the local disk only, changes nothing there, and does not fail over what others left in a shared cache.
        """
        return ()
