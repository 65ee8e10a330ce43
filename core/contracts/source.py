"""Kind `source`: turns the model argument into a folder or file on this machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelLoadError, UsageError
from .provider import BuildContext, Provider

__all__ = ["ModelLoadError", "Provider", "Report", "Source", "SourceContext", "UsageError"]

Report = Callable[[str, int, int], None]
"""report(stage, done, total): progress in bytes; total is 0 while it is unknown. Called from the fetching thread."""


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
