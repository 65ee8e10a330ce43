"""The walks of a plugin author and of a researcher: every command of their pages, in order, against a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from walks import ROOT, Shell, walk

from hotswap.core.testing.tiny_models import make_tiny_model


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    model = make_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    shell = Shell(tmp_path, MODEL=str(model))
    yield shell
    shell.close()


@pytest.mark.timeout(200)
def test_an_author_writes_checks_and_ships_a_policy(shell: Shell) -> None:
    assert walk(ROOT / "docs" / "plugins" / "ship_a_policy.md", shell) > 15


@pytest.mark.timeout(200)
def test_a_researcher_swaps_it_on_a_running_trace(shell: Shell) -> None:
    assert walk(ROOT / "docs" / "researchers" / "replay_a_trace.md", shell) > 15
