"""The core's offline engine together with the built-in plugins."""

from __future__ import annotations

from .core.engine.llm import LLM as CoreLLM
from .plugins import BUILTIN_PLUGINS


class LLM(CoreLLM):
    __doc__ = CoreLLM.__doc__
    builtins = BUILTIN_PLUGINS
