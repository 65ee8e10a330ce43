"""The offline engine where its surroundings are not what it would like."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hotswap.core.config import EngineConfig
from hotswap.core.engine import assembly
from hotswap.core.engine.llm import LLM
from hotswap.core.engine.output_processor import OutputProcessor


def test_torch_s_settings_are_left_alone_once_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runtime has read them: what the environment says later would only deceive those who ask it, such as the
    kernels' thread pool."""
    assert torch

    class Enough(Exception):
        pass

    def stop(*arguments: Any, **more: Any) -> Any:
        raise Enough

    monkeypatch.setattr(assembly, "platform_environment", lambda manager, config: {"HOTSWAP_TEST_POLICY": "PASSIVE"})
    monkeypatch.setattr(assembly, "resolve_model", stop)
    with pytest.raises(Enough):
        LLM.__new__(LLM)._start(cast(Any, None), EngineConfig.from_flat(model="tiny"))
    assert "HOTSWAP_TEST_POLICY" not in os.environ


def test_an_interrupt_that_leaves_the_engine_broken_closes_it() -> None:
    ended = []

    def broken() -> None:
        raise RuntimeError("step 3 begins, but step 2 has not been sampled")

    core = SimpleNamespace(
        abort=lambda ids: None, has_work=lambda: True, step=broken, shutdown=lambda: ended.append(True)
    )
    llm = LLM.__new__(LLM)
    llm._engine = cast(Any, SimpleNamespace(core=core))
    llm._front = cast(Any, SimpleNamespace(outputs=OutputProcessor(None)))
    llm._closed = False
    with pytest.raises(RuntimeError, match="step 3"):
        llm._abandon_rest()
    assert ended == [True]
