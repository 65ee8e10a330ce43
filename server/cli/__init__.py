"""The command line. `main` is the entry point; each command is a module that is imported when it is asked for."""

from __future__ import annotations

from .main import main

__all__ = ["main"]
