"""The Triton attention backend passes the conformance suite under Triton's interpreter, without a GPU.

The interpreter takes a second for a step, so the default run has one case, and `full` has all. Splits and float32 are
in tests/unit/test_triton_attention.py.
"""

from __future__ import annotations

from typing import ClassVar

import pytest

from hotswap.core.contracts.attention import AttentionBackend
from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.testing.suites import AttentionSuite
from hotswap.core.testing.suites.attention import AttentionCase
from hotswap.core.testing.triton_interpreter import repair_loops

pytest.importorskip("triton", reason="triton is not installed")
repair_loops()

INTERPRETER = DeviceInfo(kind="cuda", name="Triton's interpreter", capability=(9, 0))


class TestTritonPaged(AttentionSuite):
    plugin = "hotswap.plugins.attention.triton_paged"
    device: ClassVar[DeviceInfo | None] = INTERPRETER
    random_steps = 1

    def cases(self) -> list[AttentionCase]:
        return [AttentionCase((6, 2), 40, 32, "bfloat16")]

    def _first(self) -> tuple[AttentionCase, AttentionBackend]:
        case = self.cases()[0]
        return case, self.backend(case)


@pytest.mark.full
class TestTritonPagedInEveryCombination(AttentionSuite):
    plugin = "hotswap.plugins.attention.triton_paged"
    device: ClassVar[DeviceInfo | None] = INTERPRETER
    max_cases = 1000
