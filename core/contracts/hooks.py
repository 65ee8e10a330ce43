"""The marker that turns a function into a hook implementation: `from hotswap.core.contracts import hookimpl`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import pluggy

HOOK_PROJECT = "hotswap"

HookT = TypeVar("HookT", bound=Callable[..., Any])

_marker = pluggy.HookimplMarker(HOOK_PROJECT)


@overload
def hookimpl(function: HookT) -> HookT: ...
@overload
def hookimpl(**options: Any) -> Callable[[HookT], HookT]: ...
def hookimpl(function: HookT | None = None, **options: Any) -> HookT | Callable[[HookT], HookT]:
    """Marks `function`, named `hotswap_<kind>`, as this plugin's answer to that hook.

    options: pluggy's, such as `@hookimpl(specname="hotswap_policy")` for a function of another name.
    """
    marked: HookT | Callable[[HookT], HookT] = _marker(**options) if function is None else _marker(function, **options)
    return marked
