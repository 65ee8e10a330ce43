"""`hotswap version`."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata

from hotswap.core.version import __version__


def configure(parser: argparse.ArgumentParser) -> None:
    """No flags."""


def run(arguments: argparse.Namespace) -> int:
    print(f"hotswap {__version__} (Python {platform.python_version()}, torch {_installed('torch')})")
    return 0


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
