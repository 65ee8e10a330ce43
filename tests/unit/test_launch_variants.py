"""No kernel is compiled while requests wait for it: what serving launches was launched before.

In a process of its own: the interpreter that kernels run under here has no variants.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "support" / "launch_variants.py"
SAMPLING = (
    "_penalize_kernel",
    "_count_kernel",
    "_mass_kernel",
    "_sum_kernel",
    "_pick_kernel",
    "_chunk_kernel",
    "_row_kernel",
)


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[str, str]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    variants: dict[str, list[tuple[str, str]]] = json.loads(done.stdout)
    return variants


def test_eager_steps_launch_only_what_the_warm_up_launched(found: dict[str, list[tuple[str, str]]]) -> None:
    assert found["missed"] == []


def test_steps_too_large_for_graphs_do_so_too(found: dict[str, list[tuple[str, str]]]) -> None:
    assert found["missed beside graphs"] == []


def test_the_requests_were_varied_enough_to_tell(found: dict[str, list[tuple[str, str]]]) -> None:
    kernels = {name.rpartition(".")[2] for name, _ in found["served"]}
    assert kernels >= {
        *SAMPLING,
        "_step_inputs_kernel",
        "decode_kernel",
        "merge_kernel",
        "prefill_kernel",
        "matvec_kernel",
    }
    without = {name.rpartition(".")[2] for name, _ in found["missed without a warm-up"]}
    assert without >= {"decode_kernel", "merge_kernel", "matvec_kernel", "dot_kernel"}
