"""Kind `victim`: who yields when blocks run out. Called from the scheduling thread, only under memory pressure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from .policy import RequestView
from .provider import BuildContext


class VictimRule(ABC):
    """Picks one running request to preempt. The protected request (the oldest of the best class) is never offered."""

    @abstractmethod
    def choose(self, candidates: Sequence[RequestView], num_blocks_needed: int) -> RequestView:
        """One of `candidates` (never empty, in service order). The core asks again while blocks are still missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimContext(BuildContext):
    """A victim rule needs nothing beyond the common context."""
