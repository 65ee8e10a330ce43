"""The built-in attention backends, and the example of the docs, pass the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from installed_fakes import HOPPER, installed

from hotswap.core.testing.finding import find_provider
from hotswap.core.testing.suites import AttentionSuite


class TestPagedCpu(AttentionSuite):
    plugin = "hotswap.plugins.attention.paged_cpu"


class TestTorchReference(AttentionSuite):
    plugin = "hotswap.plugins.attention.torch_reference"


class OverFakes(AttentionSuite):
    """A backend over somebody's kernels, with plain torch in their place: our side of the calls is under test."""

    device = HOPPER
    max_cases = 2
    fakes: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _installed(self) -> Iterator[None]:
        with installed(self.fakes):
            yield


class TestFlashAttention2(OverFakes):
    plugin = "hotswap.plugins.attention.flash_attn"
    name = "flash_attn"
    fakes = "fa2"


class TestFlashAttention3(OverFakes):
    plugin = "hotswap.plugins.attention.flash_attn"
    name = "flash_attn"
    fakes = "fa3"


class TestFlashAttention4(OverFakes):
    plugin = "hotswap.plugins.attention.flash_attn"
    name = "flash_attn_4"
    fakes = "fa4"


class TestFlashInfer(OverFakes):
    plugin = "hotswap.plugins.attention.flashinfer"
    fakes = "flashinfer"


class TestSplit(AttentionSuite):
    """Both halves are the reference: a request must get the same bits whichever of two backends its batch is sent to."""

    plugin = "hotswap.plugins.attention.split"
    options = {"prefill": "torch_reference", "decode": "torch_reference"}
    max_cases = 2

    def context_fields(self) -> dict[str, Any]:
        reference = find_provider("attention", "hotswap.plugins.attention.torch_reference").provider
        return {"resolve": lambda kind, name: reference.build(None)}


@pytest.mark.full
class TestPagedCpuInEveryCombination(AttentionSuite):
    plugin = "hotswap.plugins.attention.paged_cpu"
    max_cases = 1000


@pytest.mark.full
class TestTorchReferenceInEveryCombination(AttentionSuite):
    plugin = "hotswap.plugins.attention.torch_reference"
    max_cases = 1000
