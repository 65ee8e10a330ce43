"""The prefill kernel's loops with and without a mask add up the same bits: where a chunk begins decides which of them a key
meets, and `--deterministic` promises that it does not show.

In a process of its own: the interpreter that kernels run under here compiles nothing, and fuses no product with a sum.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "support" / "attention_loops.py"


def test_a_mask_changes_no_arithmetic() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    counts = {name: len(loops) for name, loops in found.items()}
    assert counts == {"plain": 2, "soft cap and window": 3, "ALiBi": 2}
    for name, loops in found.items():
        assert all(loop["fma"] > 30 and loop["ex2"] > 30 for loop in loops), (name, loops)
        assert all(loop == loops[0] for loop in loops), (name, loops)
