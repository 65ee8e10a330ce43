"""Fixtures of the security tests: the application in process, and over a real socket, with a fake engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def _fixtures_of(folder: str) -> Any:
    """Another folder's fixtures; a conftest is not importable by name."""
    path = Path(__file__).parent.parent / folder / "conftest.py"
    spec = importlib.util.spec_from_file_location(f"security_{folder}_fixtures", path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_unit, _integration = _fixtures_of("unit"), _fixtures_of("integration")
make_api, api, sse = _unit.make_api, _unit.api, _unit.sse
live, eventually = _integration.live, _integration.eventually
