"""The researcher's walk: every command of its page, in order, against a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from walks import ROOT, Shell, walk

from hotswap.core.testing.tiny_models import make_tiny_model

PAGE = ROOT / "docs" / "researchers" / "replay_a_trace.md"


@pytest.mark.timeout(200)
def test_a_researcher_swaps_it_on_a_running_trace(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    shell = Shell(tmp_path, MODEL=str(model))
    try:
        assert walk(PAGE, shell) > 15
    finally:
        shell.close()
