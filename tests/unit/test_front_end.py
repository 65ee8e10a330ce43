"""Settings that the front end checks before there is a request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotswap.core.config import EngineConfig
from hotswap.core.engine.assembly import cache_dir, resolve_model
from hotswap.core.engine.client import EngineClient
from hotswap.core.engine.front_end import generation_defaults
from hotswap.core.errors import HotswapError, UsageError


def test_sampling_defaults() -> None:
    config = EngineConfig.from_flat(override_generation_config={"temperature": 0.2, "max_new_tokens": 9})
    author = {"temperature": 0.7, "top_p": 0.9, "do_sample": True, "min_p": None}
    assert generation_defaults(author, config) == {"temperature": 0.2, "top_p": 0.9, "max_tokens": 9}
    assert generation_defaults(author, EngineConfig.from_flat(generation_config="none")) == {}


@pytest.mark.parametrize(
    ("author", "settings", "expected"),
    [
        ({}, {"override_generation_config": {"max_tokens": 5}}, "'max_tokens' is no sampling default"),
        ({}, {"override_generation_config": {"max_new_tokens": "many"}}, "max_tokens must be an integer"),
        ({}, {"override_generation_config": {"temperature": "hot"}}, "temperature must be a finite number"),
        ({"top_p": 7}, {}, "--generation-config none"),
    ],
)
def test_unusable_sampling_defaults_are_refused_at_start(
    author: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        generation_defaults(author, EngineConfig.from_flat(**settings))


def test_only_known_sources_of_sampling_defaults() -> None:
    with pytest.raises(UsageError, match="generation_config"):
        EngineConfig.from_flat(generation_config="hub")


def test_a_cache_folder_that_cannot_be_made_is_told() -> None:
    with pytest.raises(UsageError, match="--download-dir"):
        cache_dir(EngineConfig.from_flat(download_dir="/dev/null/x"))


def test_a_socket_path_that_is_too_long_is_told(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    process: Any = SimpleNamespace(input_address=f"ipc://{folder}/in", output_address=f"ipc://{folder}/out")
    front: Any = None
    with pytest.raises(HotswapError, match="set TMPDIR to a short one"):
        EngineClient(process, front, EngineConfig())


def test_the_revision_is_the_models_own(tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    def fetch(model: str, *, revision: str | None, **_: Any) -> Path:
        asked.append((model, revision))
        return tmp_path

    manager: Any = SimpleNamespace(
        build=lambda *_, **__: SimpleNamespace(fetch=fetch),
        choose=lambda *_, **__: SimpleNamespace(name="l"),
        providers=lambda kind: [SimpleNamespace(name="l")],
        automatic_reasons=lambda *_: [],
    )
    common: dict[str, Any] = {"download_dir": str(tmp_path), "revision": "v2", "model": "a/b"}
    resolve_model(manager, EngineConfig.from_flat(**common, tokenizer="c/d"), None)
    assert asked == [("a/b", "v2"), ("c/d", None)]
