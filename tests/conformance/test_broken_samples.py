"""Each conformance suite must reject each of its broken samples, by the check that is about the fault."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from hotswap.core.contracts.kinds import KINDS
from hotswap.core.testing.broken import BrokenSample, broken_samples
from hotswap.core.testing.check import run_suite
from hotswap.core.testing.suites.base import ConformanceSuite

GENERIC = {name for name in vars(ConformanceSuite) if name.startswith("test_")}


def every_sample() -> Iterator[object]:
    for kind in KINDS:
        if importlib.util.find_spec(f"hotswap.core.testing.broken.{kind}") is None:
            continue  # test_every_kind_has_its_suite says so
        for sample in broken_samples(kind):
            yield pytest.param(kind, sample, id=f"{kind}-{sample.name}")


@pytest.mark.parametrize(("kind", "sample"), every_sample())
def test_broken_sample_is_rejected(kind: str, sample: BrokenSample) -> None:
    only = " or ".join([sample.caught_by, *sorted(GENERIC)])
    report = run_suite(kind, sample.provider, sample.options, op=sample.op, shrink=False, only=only)
    failed = [finding.name for finding in report.failed]
    assert any(sample.caught_by in name for name in failed), f"failed: {failed}, passed: {report.passed}"
    if not any(sample.caught_by in name for name in GENERIC):
        assert not GENERIC & set(failed), "the sample is broken in more than its fault"
    assert all(finding.reason for finding in report.failed)
