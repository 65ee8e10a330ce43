"""The table of what combines, and what start-up refuses by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotswap.core.compatibility import (
    ALWAYS,
    ROWS,
    active_features,
    as_markdown,
    check,
    refuse_incompatible,
)
from hotswap.core.config import EngineConfig
from hotswap.core.contracts import CompatibilityRow as Row
from hotswap.core.errors import UsageError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plugins" / "compatibility.md"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"swap_space": 4}, "--swap-space: the host memory tier is not in this version yet"),
        ({"preemption_mode": "swap"}, "--preemption-mode swap: the host memory tier is not in this version yet"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size above 1"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size above 1"),
        ({"data_parallel_size": 2}, "--data-parallel-size above 1"),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype: a KV cache of another data type"),
        ({"skip_tokenizer_init": True, "chat_template": "x"}, "--chat-template with --skip-tokenizer-init"),
        ({"skip_tokenizer_init": True, "tokenizer": "x"}, "--tokenizer with --skip-tokenizer-init"),
    ],
)
def test_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_incompatible(EngineConfig.from_flat(**settings))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preemption_mode": "auto"},
        {"preemption_mode": "recompute"},
        {"dtype": "float32", "kv_cache_dtype": "float32"},
        {"dtype": "float32", "kv_cache_dtype": "auto"},
        {"skip_tokenizer_init": True},
    ],
)
def test_allowed(settings: dict[str, Any]) -> None:
    refuse_incompatible(EngineConfig.from_flat(**settings))


def test_the_cache_dtype_is_checked_again_once_the_models_is_known() -> None:
    config = EngineConfig.from_flat(kv_cache_dtype="float16")
    refuse_incompatible(config)
    refuse_incompatible(config, model_dtype="float16")
    with pytest.raises(UsageError, match="--kv-cache-dtype"):
        refuse_incompatible(config, model_dtype="bfloat16")


def test_all_reasons_at_once() -> None:
    config = EngineConfig.from_flat(swap_space=1, tensor_parallel_size=2)
    with pytest.raises(UsageError, match=r"--swap-space.*; --tensor-parallel-size"):
        refuse_incompatible(config)


def test_plugins_are_features_too() -> None:
    rows = (Row("policy=a", "victim=b", False, "a never yields"), Row("policy=a", ALWAYS, True, "fine"))
    features = active_features(EngineConfig(), plugins=[("policy", "a"), ("victim", "b")])
    assert check(features, rows) == ["a never yields"]
    assert check(active_features(EngineConfig(), plugins=[("policy", "a")]), rows) == []


def test_rows_are_not_repeated_and_say_something() -> None:
    pairs = [frozenset((row.first, row.second)) for row in ROWS]
    assert len(pairs) == len(set(pairs))
    assert all(len(row.reason) > 20 for row in ROWS)
    assert all("--" in row.reason for row in ROWS if not row.allowed), "a refusal names the flag"


def test_the_page_is_generated_from_the_table() -> None:
    assert PAGE.read_text().endswith("\n\n" + as_markdown())
