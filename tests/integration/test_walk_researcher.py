"""The researcher's walk: every command of its page, in order, against a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from walks import ROOT, walk_with_a_tiny_model


@pytest.mark.timeout(200)
def test_a_researcher_swaps_it_on_a_running_trace(tmp_path: Path) -> None:
    assert walk_with_a_tiny_model(ROOT / "docs" / "researchers" / "replay_a_trace.md", tmp_path) > 15
