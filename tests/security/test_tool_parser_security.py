"""S-11 and S-37 for every built-in tool parser: what a model writes is data, and costs time in proportion."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from hotswap.core.config import EngineConfig
from hotswap.core.contracts.kinds import KINDS
from hotswap.core.contracts.tool_parser import ToolParser
from hotswap.core.engine.assembly import make_manager
from hotswap.core.testing.suites import ToolParserSuite
from hotswap.core.testing.suites import tool_parser as suite
from hotswap.plugins import BUILTIN_PLUGINS

NAMES = frozenset(suite.TOOL_NAMES)


def built_in_parsers() -> Iterator[object]:
    manager = make_manager(EngineConfig.from_flat(model="x"), BUILTIN_PLUGINS)
    for found in manager.providers("tool_parser"):
        if found.distribution == "hotswap":
            yield pytest.param(found.provider, id=found.name)


every_parser = pytest.mark.parametrize("provider", list(built_in_parsers()))


def built(provider: object) -> ToolParser:
    parser = type("Suite", (ToolParserSuite,), {"plugin": provider})().build()
    assert isinstance(parser, KINDS["tool_parser"].product_class())
    return parser  # type: ignore[no-any-return]


@every_parser
def test_s11_hostile_text_runs_nothing_and_raises_nothing(provider: object) -> None:
    parser, rng = built(provider), random.Random(11)
    suite.evaluated.clear()
    words = [*suite.HOSTILE, *suite.common_calls(), suite.ATTACK, f'{{"q": {suite.ATTACK}}}', "eval(", "__class__"]
    for _ in range(1500):
        text = "".join(rng.choices(words, k=rng.randrange(1, 12)))
        pieces = suite.cut(text, [rng.randrange(1000) for _ in range(rng.randrange(4))])
        found = suite.collect(parser.stream(NAMES), pieces)
        assert {name for name, _ in found.calls} <= NAMES
        assert not suite.evaluated, text
    for pattern in suite.COMMON_FORMATS:
        for attack in (suite.ATTACK, f'{{"q": {suite.ATTACK}}}'):
            parser.parse(pattern.replace("NAME", "get").replace("ARGUMENTS", attack), NAMES)
    assert not suite.evaluated


@every_parser
@pytest.mark.parametrize("fragment", ["[", "<tool", "<tool_call>", "{", '<tool_call>{"a": "', '{"name": [', "\\", " "])
def test_s37_a_million_characters_in_a_second(provider: object, fragment: str) -> None:
    parser, text = built(provider), fragment * (1_000_000 // len(fragment))
    seconds = []
    for _ in range(2):  # the better of two: another process may have had the machine
        start = time.process_time()
        assert parser.parse(text, NAMES).content == text
        seconds.append(time.process_time() - start)
        if seconds[-1] < 1.0:
            return
    raise AssertionError(f"{min(seconds):.1f} s")
