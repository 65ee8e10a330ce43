"""The marker that turns a function into a hook implementation: `from hotswap.core.contracts import hookimpl`."""

from __future__ import annotations

import pluggy

HOOK_PROJECT = "hotswap"

hookimpl = pluggy.HookimplMarker(HOOK_PROJECT)
