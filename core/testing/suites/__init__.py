"""The conformance suites, one per plugin kind. An author subclasses one; see base.py. Needs `hotswap[testing]`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import pytest

from ...contracts.kinds import KINDS
from ...errors import UsageError
from ...plugin_selection import nearest

if TYPE_CHECKING:
    from .attention import AttentionSuite
    from .base import ConformanceSuite
    from .executor import ExecutorSuite
    from .kernels import KernelsSuite
    from .loader import LoaderSuite
    from .logits_processor import LogitsProcessorSuite
    from .model import ModelSuite
    from .observer import ObserverSuite
    from .platform import PlatformSuite
    from .policy import PolicySuite
    from .quantization import QuantizationSuite
    from .scheduler import SchedulerSuite
    from .source import SourceSuite
    from .tool_parser import ToolParserSuite
    from .victim import VictimSuite

__all__ = [
    "AttentionSuite",
    "ConformanceSuite",
    "ExecutorSuite",
    "KernelsSuite",
    "LoaderSuite",
    "LogitsProcessorSuite",
    "ModelSuite",
    "ObserverSuite",
    "PlatformSuite",
    "PolicySuite",
    "QuantizationSuite",
    "SchedulerSuite",
    "SourceSuite",
    "ToolParserSuite",
    "VictimSuite",
    "suite_of",
]


def class_name(kind: str, ending: str = "Suite") -> str:
    """'logits_processor' -> 'LogitsProcessorSuite'."""
    return "".join(part.capitalize() for part in kind.split("_")) + ending


_MODULES: Final = {class_name(kind): kind for kind in KINDS} | {"ConformanceSuite": "base"}

# So that a bare `assert` in a suite says what the values were, in an author's run too.
_HELPERS: Final = ("kernels_rows", "kernels_sampling", "kernels_step")
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in (*_MODULES.values(), *_HELPERS)))


def __getattr__(name: str) -> Any:
    # Lazy, so that the suite of a policy does not import torch with that of attention.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def suite_of(kind: str) -> type[ConformanceSuite]:
    """The suite of a kind. Raises UsageError for an unknown one."""
    if kind not in KINDS:
        raise UsageError(f"unknown plugin kind {kind!r}{nearest(kind, KINDS)} (kinds: {', '.join(KINDS)})")
    suite: type[ConformanceSuite] = __getattr__(class_name(kind))
    return suite
