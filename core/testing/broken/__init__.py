"""Deliberately broken plugins: what each conformance suite must reject. One module per kind, each with `BROKEN`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...contracts.provider import Provider


@dataclass(frozen=True, slots=True)
class BrokenSample:
    """A plugin with one fault.

    name: what is wrong with it, in a word or two joined by `_`. caught_by: part of the name of the suite's test that must
    fail on it. options, op: as in the suite.
    """

    name: str
    provider: Provider[Any]
    caught_by: str
    options: Mapping[str, Any] = field(default_factory=dict)
    op: str | None = None


def broken_samples(kind: str) -> tuple[BrokenSample, ...]:
    """The samples of a kind."""
    samples: tuple[BrokenSample, ...] = importlib.import_module(f"{__name__}.{kind}").BROKEN
    return samples
