"""The marker that turns a function into a hook implementation: `from hotswap.core.contracts import hookimpl`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pluggy

HOOK_PROJECT = "hotswap"

HookT = TypeVar("HookT", bound=Callable[..., Any])

_marker = pluggy.HookimplMarker(HOOK_PROJECT)


def hookimpl(function: HookT) -> HookT:
    """Marks `function`, named `hotswap_<kind>`, as this plugin's answer to that hook."""
    return _marker(function)
