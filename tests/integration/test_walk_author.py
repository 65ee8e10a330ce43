"""The plugin author's walk: every command of its page, in order, against a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from walks import ROOT, walk_with_a_tiny_model


@pytest.mark.timeout(200)
def test_an_author_writes_checks_and_ships_a_policy(tmp_path: Path) -> None:
    assert walk_with_a_tiny_model(ROOT / "docs" / "plugins" / "ship_a_policy.md", tmp_path) > 15
