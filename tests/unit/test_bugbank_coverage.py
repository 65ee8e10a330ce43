"""Each known fault of other engines that this version answers for has a test whose name begins with its id."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

# Groups A to F, I, N, O, P: streaming, sampling, limits, prefix cache, preemption, mixed batches, chat and tools, aborts,
# metrics, start-up.
NUMBERS = {
    "a": (1, 3, 5, 6, 7, 8, 9, 10),
    "b": (2, 3, 4, 5, 7, 8, 9, 10, 11),
    "c": (1, 2, 4, 6, 7, 8, 9),
    "d": (1, 3, 4, 5, 6, 7),
    "e": (1, 3, 4, 5),
    "f": (1, 2),
    "i": (1, 2, 3, 5, 6, 7, 8),
    "n": (1, 2, 4),
    "o": (1, 2, 4),
    "p": (1, 2),
}
FAULTS = [f"{group}{number:02}" for group, numbers in NUMBERS.items() for number in numbers]

OF_SECURITY = (3, 4, 5, 9, 14, *range(21, 27), 32, 33, 38, 40, 41, *range(43, 49), *range(50, 55))
SECURITY = [f"s{number:02}" for number in OF_SECURITY]


@cache
def names() -> dict[str, list[str]]:
    """The test functions of each folder of tests/, methods included."""
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.setdefault(file.relative_to(TESTS).parts[0], []).append(node.name)
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_a_test_named_after_it(fault: str) -> None:
    assert any(name.startswith(f"test_{fault}_") for name in names()["bugbank"])


@pytest.mark.parametrize("item", SECURITY)
def test_every_requirement_of_security_has_a_test_named_after_it(item: str) -> None:
    everywhere = [name for folder in names().values() for name in folder]
    assert any(name.startswith(f"test_{item}_") for name in everywhere)


def test_no_test_in_the_bug_bank_is_without_an_id() -> None:
    ids = tuple(f"test_{fault}_" for fault in FAULTS)
    assert [name for name in names()["bugbank"] if not name.startswith(ids)] == []
