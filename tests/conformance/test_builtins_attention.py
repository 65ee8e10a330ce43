"""The built-in attention backends, and the example of the docs, pass the conformance suite."""

from __future__ import annotations

import pytest

from hotswap.core.testing.suites import AttentionSuite


class TestPagedCpu(AttentionSuite):
    plugin = "hotswap.plugins.attention.paged_cpu"


class TestTorchReference(AttentionSuite):
    plugin = "hotswap.plugins.attention.torch_reference"


@pytest.mark.full
class TestPagedCpuInEveryCombination(AttentionSuite):
    plugin = "hotswap.plugins.attention.paged_cpu"
    max_cases = 1000


@pytest.mark.full
class TestTorchReferenceInEveryCombination(AttentionSuite):
    plugin = "hotswap.plugins.attention.torch_reference"
    max_cases = 1000
